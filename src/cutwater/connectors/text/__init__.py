"""Lines of text to columns."""
