"""What the user writes and starts: streams, steps, jobs.  Building runs nothing."""
