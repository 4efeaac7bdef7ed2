"""Where workers run: as Spark jobs, one for each slot."""
