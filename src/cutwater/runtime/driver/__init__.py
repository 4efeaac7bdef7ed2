"""The driver of a job: coordinator, checkpoints, splits, sinks, savepoints, requests of users."""
