"""Delta Lake: tables as replayable sources, and as sinks with one commit for all subtasks of a checkpoint."""
