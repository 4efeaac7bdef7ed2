"""Makes the helpers of this folder importable from its tests."""
