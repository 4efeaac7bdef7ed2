"""RocksDB and scratch folders on the worker, for state that need not fit in memory."""
