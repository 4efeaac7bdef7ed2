"""Where snapshots live: store, log, manifest, retention, integrity."""
