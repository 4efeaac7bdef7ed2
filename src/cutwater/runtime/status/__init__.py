"""What can be known of a running job: one status value, who fills it in, and its text."""
