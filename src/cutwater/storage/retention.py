"""Which checkpoints are kept, and removing the others."""

from __future__ import annotations

from cutwater.storage.base import Store
from cutwater.storage.log import JobLog

__all__ = ["Retention", "list_jobs"]


class Retention:
    """Deletes retired checkpoints and leftovers of one job.  Call ``collect`` after each publish."""

    def __init__(self, store: Store, job: str, log: JobLog) -> None: ...

    def collect(self) -> list[str]:
        """Remove what no restore needs any more; returns warnings (a failed delete is tried again later)."""
        ...


def list_jobs(store: Store) -> list[str]:
    """Names of the jobs in a checkpoint directory."""
    ...
