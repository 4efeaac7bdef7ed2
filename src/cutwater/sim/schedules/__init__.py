"""Simulated runs as data: the dataflow, its graph, and the schedule of settings and faults."""
