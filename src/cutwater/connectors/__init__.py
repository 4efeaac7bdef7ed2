"""Replayable sources and transactional sinks."""
