"""One status model; the command line renders it."""
