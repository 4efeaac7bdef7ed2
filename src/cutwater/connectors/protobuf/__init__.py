"""Protobuf: bytes to columns and back, by a program of a message type that one kernel runs."""
