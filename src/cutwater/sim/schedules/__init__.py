"""What a simulated run is made of, as data: the dataflow, its graph, and the schedule of settings and faults."""
