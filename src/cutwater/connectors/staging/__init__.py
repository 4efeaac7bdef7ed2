"""Output rows on disk before they count: the write-ahead log that sinks share."""
