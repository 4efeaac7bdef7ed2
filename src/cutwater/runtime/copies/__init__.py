"""Copies of snapshot files near the workers, so that a restore need not wait for the store."""
