"""Rows enriched from a table in memory or by calls to somebody outside."""
