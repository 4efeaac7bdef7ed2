"""What the sources have in common: the user's data source, and a folder of the job's store."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import pyarrow as pa

from cutwater.config import FileAccess
from cutwater.connectors.base import Json, Split, check_rate
from cutwater.connectors.data_source import spark_api
from cutwater.connectors.data_source.hosted import Hosted
from cutwater.connectors.data_source.range_log import Plan, RangeLog
from cutwater.connectors.staging import Guard
from cutwater.errors import BuildError, CutwaterError, DataError, InvariantError, UserCodeError
from cutwater.storage.store.opening import open_store, store_at
from cutwater.storage.store.seal import PLAIN, Seal

_END_S = 10.0
"""How long the end of a job waits for the user's code."""


class StagedSource:
    """A data source of the user's, and what the job has planned to read of it.

    Args:
        hosted: the data source.
        schema: of the rows; ``None``: as it says itself.
        repeats: rows are used as they are read, since they can be read again; else they are made durable first.
        rate: rows per second over all subtasks.
        discover_interval_ms: between two looks for what is new.

    Raises:
        BuildError: a schema that is none.
    """

    replayable = True
    stages_in_store = True
    pickles_user_code = True

    def __init__(
        self, hosted: Hosted, schema: object, *, repeats: bool, rate: float | None, discover_interval_ms: float
    ) -> None:
        check_rate(rate)
        self.hosted, self.repeats = hosted, repeats
        self.struct = hosted.schema(schema)
        self.schema: pa.Schema = spark_api.arrow_schema(self.struct)
        self.rate, self.discover_interval_ms = rate, discover_interval_ms
        self._uri, self._own = "", True
        self._seal = PLAIN
        self._access: FileAccess = "owner"
        self._log: RangeLog | None = None
        self._plan: Plan | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.hosted.name})"

    def __getstate__(self) -> dict[str, Any]:
        """Without the key, and what belongs to one process."""
        return {**self.__dict__, "_seal": PLAIN, "_log": None, "_plan": None}

    def _copy(self, **changed: object) -> Self:
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__getstate__(), **changed)
        return copy

    def stage(self, uri: str, seal: Seal = PLAIN, access: FileAccess = "owner", own: bool = True) -> Self:
        """The source with its folder, in which the plan is written down unless that was done before.

        Args:
            uri: of the folder.
            seal, access: of the job.
            own: the folder is the job's; else its leader's, which a fork only reads.

        Raises:
            BuildError: a fork of a job whose rows are staged as they are read.
            UserCodeError: the user's code failed.
            CorruptSnapshotError: what was planned before is damaged.
        """
        if not own and not self.repeats:
            raise BuildError(
                f"a fork cannot read what its leader makes durable of {self.hosted.name} as it reads",
                hint="With replayable=True both read the data source itself.",
            )
        if own:
            open_store(uri, seal, access)
        staged = self._copy(_uri=uri, _seal=seal, _access=access, _own=own)
        if own and staged.log.plan() is None:
            staged.log.begin(staged.planned())
        return staged

    def guarded(self, guard: Guard) -> Self:
        """The same, which compares what it finds in its folder with the job's seal."""
        return self._copy(_seal=guard.seal, _access=guard.access)

    def planned(self) -> Plan:
        """A new plan."""
        raise InvariantError(f"{self!r} plans nothing")

    @property
    def log(self) -> RangeLog:
        """The folder."""
        if self._log is None:
            if not self._uri:
                raise InvariantError(f"{self!r} has no folder before the job starts")
            self._log = RangeLog(store_at(self._uri, self._seal, self._access))
        return self._log

    @property
    def plan(self) -> Plan:
        """What was planned.

        Raises:
            DataError: it is gone.
        """
        if self._plan is None:
            self._plan = self.log.plan()
        if self._plan is None:
            raise DataError(f"what was planned to read of {self.hosted.name} is gone from {self.log.store.uri}")
        return self._plan

    def check_plan(self, data: Json) -> None:
        """Refuse a split of another plan.

        Raises:
            DataError: it is one.
        """
        if data["plan"] != self.plan.id:
            raise DataError(
                f"the snapshot says how far another job has read {self.hosted.name}, by what that one had planned",
                hint="Restore it in that job, under its name and in its checkpoint directory; or begin without it.",
            )

    def goes_on(self, known: Mapping[str, Json], listed: list[Split]) -> list[Split]:
        """See ``SourceHooks.goes_on``.

        Raises:
            DataError: the snapshot is one of another plan.
        """
        for data in known.values():
            self.check_plan(data)
        return listed


def offset_of(told: object) -> Json:
    """An offset as it is written down.

    Raises:
        DataError: it cannot be.
    """
    try:
        return json.loads(json.dumps(told))
    except (TypeError, ValueError) as error:
        raise DataError(f"the offset {told!r:.200} cannot be written as JSON: {error}") from error


def at_the_end(name: str, work: Callable[[], None]) -> None:
    """Let the user's code do its last things, without waiting for it for long.

    Raises:
        CutwaterError: what ``work`` raises, or it takes too long.
    """
    errors: list[CutwaterError] = []

    def run() -> None:
        try:
            work()
        except CutwaterError as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="cutwater-data-source", daemon=True)
    thread.start()
    thread.join(_END_S)
    if thread.is_alive():
        raise UserCodeError(f"{name}: its commit() or stop() has not returned within {_END_S:.0f} s of the job's end")
    if errors:
        raise errors[0]


class Reached(NamedTuple):
    """How far a stream has come, by the checkpoints that a job retains.

    >>> Reached.of([3, 5], repeats=False)
    Reached(done=5, needed=3)
    >>> Reached.of([3, 5], repeats=True)
    Reached(done=3, needed=3)
    """

    done: int
    """The user's reader is asked for no range before this one any more.

    A restore of an older checkpoint reads what was made durable; without that, it asks the reader once more.
    """
    needed: int
    """No checkpoint needs a range before this one."""

    @staticmethod
    def of(ranges: Sequence[int], *, repeats: bool) -> Reached:
        """By the range that each checkpoint reads on from.

        Args:
            ranges: of the oldest checkpoint first.
            repeats: as of ``StagedSource``.
        """
        needed = min(ranges)
        return Reached(needed if repeats else ranges[-1], needed)
