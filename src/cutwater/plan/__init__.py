"""The logical graph, the physical plan, and whether a snapshot fits: plain values."""
