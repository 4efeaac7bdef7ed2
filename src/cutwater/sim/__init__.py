"""The same core in one seeded thread: simulated network, disk and clock, faults, and a judge that knows everything."""
