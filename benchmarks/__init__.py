"""The project's own measurements: ``python -m benchmarks.compare``, ``.latency``, ``.recovery``; see docs/benchmarks.md."""
