"""Spark DataFrames as replayable sources."""
