"""Python values by key, timers, and their snapshots."""
