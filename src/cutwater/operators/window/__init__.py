"""Windows: tumbling, sliding, session and global, with their tables and firing."""
