"""Any snapshot by its address: found, verified, read."""
