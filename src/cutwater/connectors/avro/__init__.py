"""Avro in messages: schemas as small programs that one kernel runs, and a registry that knows who wrote what."""
