"""One chain of a subtask: its operators, the reading of its source, and the writing of its sinks."""
