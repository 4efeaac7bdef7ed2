"""The memory of a subtask: keys and key groups, columnar tables, segments."""
