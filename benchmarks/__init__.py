"""The project's own measurements: ``compare``, ``latency`` and ``recovery``; docs/benchmarks.md explains them."""
