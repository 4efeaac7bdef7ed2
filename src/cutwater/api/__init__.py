"""The API of users: streams, steps, jobs.  Building runs nothing."""
