"""Joins of two streams: by interval, as of a time, by window, of two tables."""
