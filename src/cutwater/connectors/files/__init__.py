"""Files as sources and as sinks: Parquet, CSV and JSON lines."""
