"""A worker: its subtasks, chains of operators, snapshots and restores."""
