"""The worked examples of the theory as runs of the real machines, and ideas that do not work, with their wrong cuts.

``python -m docs.pictures`` draws them all.
"""
