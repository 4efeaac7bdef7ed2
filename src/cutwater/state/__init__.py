"""What a subtask remembers: keys and key groups, columnar tables, segments."""
