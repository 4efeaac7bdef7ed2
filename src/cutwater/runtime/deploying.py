"""What each worker is told to build when an attempt begins, or regions go back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from cutwater.runtime import control as c
from cutwater.runtime.control_server import WorkerLink
from cutwater.runtime.publisher import Publisher
from cutwater.runtime.splits import Splits
from cutwater.storage.recovery import Restorable

__all__ = ["deploys"]


def deploys(
    attempt: int,
    restorable: Restorable | None,
    publisher: Publisher,
    links: Sequence[WorkerLink],
    members: Mapping[int, frozenset[int]],
    assigned: Mapping[tuple[str, int], list[c.SplitAssignment]],
    splits: Splits,
    last_checkpoint_id: int,
) -> Iterator[tuple[WorkerLink, c.Deploy]]:
    """A message for each region that begins, and each worker that holds a part of it.

    Args:
        links: per slot, the worker that fills it.
        members: by region, its slots.
        assigned: by read step and subtask, what it reads.
    """
    for region, slots in members.items():
        for slot in sorted(slots):
            deploy = c.Deploy(
                attempt=attempt,
                incarnations=[other.incarnation for other in links],
                peers=[cast(c.Hello, other.hello).data_address for other in links],
                restore=restorable.completed if restorable else None,
                parallelism=publisher.parallelism,
                restore_from=publisher.location,
                upgrade=publisher.upgrade,
                splits={step: found for (step, subtask), found in assigned.items() if subtask == slot},
                rates=splits.rates(slot),
                no_more_splits=splits.complete,
                last_checkpoint_id=last_checkpoint_id,
                region=region,
            )
            yield links[slot], deploy
