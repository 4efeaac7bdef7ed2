"""Storage of snapshots: store, log, manifest, retention, integrity."""
