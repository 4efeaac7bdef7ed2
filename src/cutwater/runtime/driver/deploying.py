"""Deployment: what each worker is told when an attempt begins, or regions go back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias, cast

from cutwater.config import JobConfig, RecoveryName
from cutwater.protocol.job.machine import JobMachine
from cutwater.runtime.control import messages as c
from cutwater.runtime.control.determinant_logs import DeterminantLogs
from cutwater.runtime.control.links import WorkerLink
from cutwater.runtime.control.messages import CopyPlaces
from cutwater.runtime.control.read_limit import Limits
from cutwater.runtime.copies.copies import choose_holders
from cutwater.runtime.driver.publisher import Publisher
from cutwater.runtime.driver.splits import Splits
from cutwater.runtime.transport.secret import Secret, hidden
from cutwater.storage.reading import Restorable

Assigned: TypeAlias = Mapping[tuple[str, int], list[c.SplitAssignment]]
"""By read step and subtask, what it reads."""


def passes_rows(recovery: RecoveryName) -> bool:
    """True if rows pass between what goes back and what runs on."""
    return recovery in ("upstream", "task")


def held_by(links: Iterable[WorkerLink]) -> frozenset[str]:
    """Files of the job that these workers have copies of."""
    return frozenset[str]().union(*(link.copies for link in links))


class Deploying:
    """Belongs to the coordinator's thread.

    Args:
        machine: knows the regions.
        config: with ``recovery="upstream"`` and ``"task"`` rows pass between regions, so that those who run on must
            know of those who go back.
        secret: of the job, under which workers are told its key.
    """

    def __init__(
        self, publisher: Publisher, splits: Splits, machine: JobMachine, config: JobConfig, secret: Secret
    ) -> None:
        self._publisher, self._splits, self._machine = publisher, splits, machine
        self._secret = secret
        self._recovery: RecoveryName = config.recovery
        self._attempts: dict[int, int] = {}
        self._news = DeterminantLogs()
        """Determinant logs as told by acknowledgements, where the job has loops."""

    def going_back(self, regions: Sequence[int]) -> str:
        """How much goes back with these regions, in a user's words."""
        everything = self._machine.regions
        if self._recovery == "upstream":
            return f"{sum(len(everything[r]) for r in regions)} of {sum(map(len, everything))} subtasks"
        return f"{len(regions)} of {len(everything)} {'workers' if self._recovery == 'task' else 'regions'}"

    def hear(self, news: bytes) -> None:
        """An acknowledgement came; a verdict on a loop may rest on choices that nobody else knows who lives on (R0)."""
        if news:
            self._news.peer("worker").hear(news)

    def completed(self, checkpoint_id: int) -> None:
        """Nobody goes back behind this checkpoint any more."""
        self._news.completed(checkpoint_id)

    def messages(
        self,
        attempt: int,
        restorable: Restorable | None,
        regions: Iterable[int],
        links: Sequence[WorkerLink],
        assigned: Assigned,
        last_checkpoint_id: int,
        limits: Limits | None,
    ) -> Iterator[tuple[WorkerLink, CopyPlaces | c.Deploy | c.PeersReset]]:
        """For each worker that runs on, who goes back; for each region that begins, what its workers build.

        Args:
            links: per slot, the worker that fills it.
            limits: of a fork, how far it may read.
        """
        hellos = [cast(c.Hello, link.hello) for link in links]
        addresses = [hello.data_address for hello in hellos]
        copies: dict[str, list[int]] = {}
        if (replicas := self._publisher.replicas) is not None:
            copies = _copies(restorable, links) if self._publisher.location is None else {}
            for link, holders in zip(links, choose_holders([hello.host for hello in hellos], replicas), strict=True):
                yield link, CopyPlaces([other.incarnation for other in links], addresses, holders)
        begins = {region: sorted(s for s, r in self._machine.parts if r == region) for region in sorted(regions)}
        survivors = sorted(place for place in self._machine.parts if place[1] not in begins)
        incarnations, restored = [k.incarnation for k in links], restorable.completed.checkpoint_id if restorable else 0
        if not survivors:
            self._news = DeterminantLogs(restored)
        self._attempts |= dict.fromkeys(begins, attempt)
        passing = passes_rows(self._recovery)
        if passing and survivors:
            for slot in sorted({slot for slot, _ in survivors}):  # first: nobody else lets the replacements in
                yield links[slot], c.PeersReset(attempt, list(begins), incarnations, restored)
        for region, slots in begins.items():
            for slot in slots:
                deploy = c.Deploy(
                    attempt=attempt,
                    incarnations=incarnations,
                    peers=addresses,
                    restore=restorable.completed if restorable else None,
                    parallelism=self._publisher.parallelism,
                    restore_from=self._publisher.location,
                    upgrade=self._publisher.upgrade,
                    splits={step: found for (step, subtask), found in assigned.items() if subtask == slot},
                    rates=self._splits.rates(slot),
                    no_more_splits=self._splits.complete,
                    last_checkpoint_id=last_checkpoint_id,
                    region=region,
                    survivors=survivors if passing else [],
                    attempts=[self._attempts[other] for other in range(len(self._machine.regions))],
                    limits=limits,
                    shadows=self._publisher.forks.shadows,
                    fresh_sinks=self._publisher.has_fresh_sinks(restorable),
                    copies=copies,
                    news=self._news.peer("worker").news(),
                    key=hidden(self._publisher.seal, self._secret),
                )
                yield links[slot], deploy


def _copies(restorable: Restorable | None, links: Sequence[WorkerLink]) -> dict[str, list[int]]:
    """By file of the checkpoint: slots whose workers have a copy of it."""
    files = {entry.file for entry in restorable.manifest.entries} if restorable is not None else set[str]()
    found = {file: [slot for slot, link in enumerate(links) if file in link.copies] for file in sorted(files)}
    return {file: slots for file, slots in found.items() if slots}
