"""One simulated run: subtasks, drivers, network, disk, clock, faults, and the oracle."""
