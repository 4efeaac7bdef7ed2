"""Messages of workers to the coordinator."""

from __future__ import annotations

import msgspec

from cutwater.storage.savepoint.files import SavepointFile
from cutwater.storage.snapshot.manifest import Entry, SubtaskRecord


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a worker, after the handshake."""

    slot: int
    pid: int
    host: str
    data_address: tuple[str, int]
    copies: list[str] = []
    """Files of the job that a predecessor on the same machine left copies of."""

    @property
    def where(self) -> str:
        """Process and host, in a user's words.

        >>> Hello(1, 4242, "node7", ("10.0.0.7", 5000)).where
        'on host node7 (pid 4242)'
        """
        return f"on host {self.host} (pid {self.pid})"


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    attempt: int
    region: int = 0


class SourceTime(msgspec.Struct, frozen=True, tag="source_time"):
    """Time of a subtask of a read step (``protocol.checkpoint.step_times.SubtaskTime``)."""

    attempt: int
    region: int
    step: str
    subtask: int
    known: int
    holding: bool
    watermark: int
    finished: int
    quiet: bool


class LoopReport(msgspec.Struct, frozen=True, array_like=True):
    """View of a wave by a subtask in a loop (``protocol.checkpoint.loops.LoopReport``)."""

    vertex: int
    subtask: int
    quiet: bool
    outside_ended: bool
    drained: bool
    outside: tuple[int, bool]
    """Watermark and idleness of the inputs from outside the loop."""


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """All subtasks of the worker froze for this checkpoint and everything is durable (A6)."""

    attempt: int
    checkpoint_id: int
    subtasks: list[SubtaskRecord]
    entries: list[Entry]
    freeze_ms: float
    """Longest stop of the loop for freezing."""
    write_ms: float
    loops: list[LoopReport] = []
    probe: bool = False
    """Nothing was stored: every subtask of the worker has passed the wave on."""
    region: int = 0
    files: list[SavepointFile] = []
    """Of a savepoint."""
    news: bytes = b""
    """Determinant logs as far as the worker knows them; verdicts on loops rest on them (R0)."""


class CaughtUp(msgspec.Struct, frozen=True, tag="caught_up"):
    """Regions restored beside survivors have sent again all that the survivors have (R3, R4)."""

    attempt: int
    region: int


class ProbeWanted(msgspec.Struct, frozen=True, tag="probe"):
    """The head of a loop wants a wave that stores nothing (C6, W3)."""

    attempt: int
    vertex: int
    subtask: int
    region: int = 0


class Decline(msgspec.Struct, frozen=True, tag="decline"):
    attempt: int
    checkpoint_id: int
    vertex: int
    subtask: int
    reason: str
    message: str
    region: int = 0
    error: tuple[str, str, str] | None = None
    """Class, step and hint of what is behind it."""


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """A subtask handled the end of its data."""

    attempt: int
    vertex: int
    subtask: int
    region: int = 0


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """All sinks that the worker holds of a region committed this checkpoint.  Told where somebody waits for it."""

    attempt: int
    checkpoint_id: int
    region: int = 0


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    attempt: int
    kind: str
    """Class name of the error."""
    message: str
    step: str
    vertex: int
    subtask: int
    traceback: str
    retryable: bool
    hint: str = ""
    secondary: bool = False
    """The loss of another worker: if that one has a story, its own report says more."""
    region: int = 0


class FixedCost(msgspec.Struct, frozen=True, array_like=True):
    """Milliseconds that a call of a step costs whatever the number of its rows, where above ``slice_budget_ms``."""

    first: str
    """The first of the steps that run as one with it."""
    step_ms: float
    chain_ms: float
    """Of all steps that are called together."""
    call_ms: float
    """Milliseconds that a call lasts, with its rows."""
    rows: int
    """Of a call."""


class Metrics(msgspec.Struct, frozen=True, tag="metrics"):
    """Counters since the start of the attempt, per step."""

    attempt: int
    time_ms: float
    rows_in: dict[str, int]
    rows_out: dict[str, int]
    watermarks: dict[str, int]
    counters: dict[str, dict[str, int]]
    busy_ms: dict[str, float]
    """Spent in the step, and in sending what it made."""
    backpressured_ms: dict[str, float]
    """The step could make no rows, because some output of its chain had no room."""
    idle_ms: float
    region: int = 0
    rows_unread: dict[str, dict[int, int]] = {}
    """Rows of outputs that no step reads, by the number of the output."""
    fixed_costs: dict[str, FixedCost] = {}
    """By step, of each chain the one that costs most."""


CONSOLE = "console"
"""Level of what is meant for the user's eyes as it is."""


class Log(msgspec.Struct, frozen=True, tag="log"):
    level: str
    message: str


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The worker lives, whatever its loop does."""


class CopiesHeld(msgspec.Struct, frozen=True, tag="copies"):
    """Files of the job that the worker has copies of, its own and for others, and what became of them."""

    files: list[str]
    checkpoint_id: int
    """The newest one whose files were brought where they should be, as far as there was room."""
    missing_bytes: int
    """Of the worker's part of it, without some of the copies that were asked for."""
    memory_bytes: int
    """Held for other workers."""
    local_bytes: int
    restored_bytes: tuple[int, int, int] = (0, 0, 0)
    """By the last restore: from copies on the machine, from other workers, from the checkpoint directory."""
