"""What a step does to a batch."""
