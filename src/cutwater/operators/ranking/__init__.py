"""Steps that keep some rows of each key: top-n and deduplicate."""
