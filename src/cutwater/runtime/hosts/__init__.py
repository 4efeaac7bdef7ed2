"""Hosts of workers: Spark jobs, one for each slot."""
