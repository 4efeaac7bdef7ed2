"""The server, and what a test does with it."""

from __future__ import annotations

from postgres_world import database, postgres

__all__ = ["database", "postgres"]
