"""The broker, and what a test does with it."""

from __future__ import annotations

from kafka_world import broker, produce, proxy, read, topic

__all__ = ["broker", "produce", "proxy", "read", "topic"]
