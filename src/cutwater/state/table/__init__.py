"""Columnar tables by key: columns, changes between freezes, their way to disk and back."""
