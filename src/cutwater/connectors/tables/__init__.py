"""Tables of a database as exactly-once sinks."""
