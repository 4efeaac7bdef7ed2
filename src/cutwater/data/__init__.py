"""What every room says about rows: schemas as text, values, times, the column ``op``, words of 64 bits."""
