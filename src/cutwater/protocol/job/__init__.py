"""The life of a job: workers that come and go, attempts, restarts, regions, rescales."""
