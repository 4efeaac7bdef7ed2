"""PySpark's Python data sources, read and written without micro-batches."""
