"""Kafka: topics as replayable sources, and as sinks that commit with a checkpoint."""
