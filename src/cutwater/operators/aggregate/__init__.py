"""Aggregates by key: their accumulators, the table in which they lie, running aggregates."""
