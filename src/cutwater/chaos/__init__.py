"""A user's own job under faults: whether its result is the one that it has without."""
