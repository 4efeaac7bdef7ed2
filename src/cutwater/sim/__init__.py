"""The same core in one seeded thread: simulated network, disk, clock, faults, and an oracle that knows everything."""
