"""What the user writes: streams, steps, the logical graph and the physical plan.  Building runs nothing."""
