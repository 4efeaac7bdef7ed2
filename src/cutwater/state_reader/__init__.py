"""A snapshot as tables: which state there is, reading it, comparing two, writing one."""
