"""Tables of Postgres as updating streams: a consistent snapshot, then the changes by logical replication."""
