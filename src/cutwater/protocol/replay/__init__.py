"""Determinants: what a subtask chose, so that a replay can be made to choose the same."""
