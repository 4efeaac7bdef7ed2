"""The coordinator's decisions on checkpoints: when they begin, what becomes of them, loops, event time of steps."""
