"""Steps that keep nothing: expressions, a user's functions, union, unnest, key check."""
