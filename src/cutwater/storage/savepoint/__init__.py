"""Savepoints: snapshots that belong to the user, in a format that any program can open."""
