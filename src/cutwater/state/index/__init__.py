"""From the key of a row to its number in a table."""
