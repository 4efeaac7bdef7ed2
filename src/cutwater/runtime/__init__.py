"""Performs the effects: coordinator server, worker, channels, wire; the host on Spark."""
