"""Rows of several sides by key, in the order in which they came."""
