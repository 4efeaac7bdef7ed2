"""The job log: which attempt owns the job, and which checkpoints count."""
