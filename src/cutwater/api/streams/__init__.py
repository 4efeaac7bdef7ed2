"""Streams as the user writes them: every method adds a step and returns the stream it makes."""
