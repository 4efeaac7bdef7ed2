"""The catalog, and what a test does with it."""

from __future__ import annotations

from iceberg_world import before_commits, warehouse

__all__ = ["before_commits", "warehouse"]
