"""The protocols, as pure machines: events in, effects out.  No I/O, no clock, no threads, no Spark."""
