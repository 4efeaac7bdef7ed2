"""Rows, as all rooms speak of them: schemas as text, values, times, the column ``op``, words of 64 bits."""
