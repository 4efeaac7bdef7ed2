"""Status of a running job: one value, its collector, and its text."""
