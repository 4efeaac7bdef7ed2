"""Servers of other projects for tests, benchmarks and demos: fetched once, and gone without a trace."""
