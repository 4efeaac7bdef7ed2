"""Settings of a job: frozen, units in the names.  Names follow Flink's checkpointing options in Python spelling."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from typing import Any, Literal

import msgspec

from cutwater.data.decoding import prepare
from cutwater.errors import ConfigError

ProtocolName = Literal["none", "synchronous", "chandy_lamport", "aligned", "unaligned", "at_least_once"]
RecoveryName = Literal["job", "region", "upstream", "task"]
StateBackend = Literal["memory", "rocksdb"]
SchedulerName = Literal["default", "adaptive"]
LogLevelName = Literal["debug", "info", "warning", "error", "critical"]
FileAccess = Literal["owner", "group"]

RENAMED_SETTINGS = {"group_deadline": "resource_timeout"}
"""Old names that programs still use, without ``_ms``, and what they are called now."""

_UNITS_US = (("d", 86_400_000_000), ("h", 3_600_000_000), ("m", 60_000_000), ("s", 1_000_000), ("ms", 1000), ("us", 1))
_SPELLINGS = {
    0.001: ("us", "µs", "μs", "microsecond", "microseconds"),
    1.0: ("ms", "msec", "millisecond", "milliseconds"),
    1_000.0: ("s", "sec", "secs", "second", "seconds"),
    60_000.0: ("m", "min", "mins", "minute", "minutes"),
    3_600_000.0: ("h", "hr", "hrs", "hour", "hours"),
    86_400_000.0: ("d", "day", "days"),
    604_800_000.0: ("w", "week", "weeks"),
}
"""What Spark, Polars and people write, by milliseconds; words in any case, abbreviations as they stand here."""
_UNITS_MS = {spelling: ms for ms, spellings in _SPELLINGS.items() for spelling in spellings}
_NO_LENGTH = {
    **dict.fromkeys(("mo", "mon", "month", "months"), "month"),
    **dict.fromkeys(("q", "quarter", "quarters"), "quarter"),
    **dict.fromkeys(("y", "yr", "year", "years"), "year"),
}
_TOO_SHORT = frozenset({"ns", "nanosecond", "nanoseconds"})
_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([^\W\d_]+)\s*")
_DURATION_HINT = "Write for example '500ms', '1s', '1h 30m', '10 minutes'."


def parse_duration_ms(value: str | float | timedelta, *, name: str = "duration") -> float:
    """Milliseconds of a duration: ``"500ms"``, ``"1h 30m"``, ``"10 minutes"``, ``"interval 1 hour"``, a ``timedelta``.

    Units are us, ms, s, m (minutes), h, d, w and their words, singular or plural, of which the words may be in any
    case.  A month or a year has no fixed length and is refused, as is ``"1M"``, which means months elsewhere.  A number
    is taken only if it is 0 or ``name`` tells its unit (``roll_interval_ms``): it could mean seconds, too.

    Raises:
        ConfigError: not a duration, a number without unit, a unit without fixed length, or negative.

    >>> parse_duration_ms("1h 30m"), parse_duration_ms(timedelta(minutes=1)), parse_duration_ms("1 Minute")
    (5400000.0, 60000.0, 60000.0)
    """
    if isinstance(value, timedelta):
        value, name = value / timedelta(milliseconds=1), f"{name}_ms"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _number_ms(value, name)
    if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"{name} {value!r} is not a duration", hint=_DURATION_HINT)
    text = re.sub(r"^\s*interval\s+", "", value, flags=re.IGNORECASE)
    total, pos = 0.0, 0
    while part := _DURATION.match(text, pos):
        total += float(part[1]) * _unit_ms(part[2], f"{name} {value!r}")
        pos = part.end()
    if pos == 0 or pos < len(text):
        digits = text.strip().replace(".", "", 1)
        hint = f"Say the unit: '{text.strip()}s' or '{text.strip()}ms'." if digits.isdecimal() else _DURATION_HINT
        raise ConfigError(f"{name} {value!r} is not a duration", hint=hint)
    return total


def _number_ms(value: float, name: str) -> float:
    if value < 0:
        raise ConfigError(f"{name} {value!r} is negative")
    if not math.isfinite(value):
        raise ConfigError(f"{name} {value!r} is not a duration", hint=_DURATION_HINT)
    if value and not name.endswith("_ms"):
        raise ConfigError(f"{name} {value!r} has no unit", hint=f"Write for example '{value}s' or '{value}ms'.")
    return float(value)


def _unit_ms(unit: str, where: str) -> float:
    """Length of a unit; ``where`` begins the message if there is none."""
    word = unit.lower() if len(unit) > 2 else unit
    if word in _UNITS_MS:
        return _UNITS_MS[word]
    if unit == "M":
        raise ConfigError(
            f"{where}: 'M' may be minutes or months", hint="Write 'm' or 'min' for minutes, 'd' for days."
        )
    if word.lower() in _NO_LENGTH:
        raise ConfigError(
            f"{where}: a {_NO_LENGTH[word.lower()]} has no fixed length", hint="Write it in days: '30d', '365 days'."
        )
    if word.lower() in _TOO_SHORT:
        raise ConfigError(f"{where} is finer than the clock", hint="The shortest unit is 'us', a microsecond.")
    if unit.lower() in _UNITS_MS:
        raise ConfigError(f"{where}: no unit {unit!r}", hint=f"Did you mean {unit.lower()!r}?")
    raise ConfigError(f"{where}: no unit {unit!r}", hint=_DURATION_HINT)


def format_us(us: int) -> str:
    """A number of microseconds as a user writes it.

    >>> format_us(5_400_000_000), format_us(-1500), format_us(0)
    ('1h 30m', '-1ms 500us', '0s')
    """
    parts: list[str] = []
    rest = abs(us)
    for unit, size_us in _UNITS_US:
        count, rest = divmod(rest, size_us)
        if count:
            parts.append(f"{count}{unit}")
    return ("-" if us < 0 else "") + (" ".join(parts) or "0s")


class RestartConfig(msgspec.Struct, frozen=True, kw_only=True):
    """When and how often a failed job is restarted (names and defaults as in Flink).

    ``strategy``: ``"none"``, ``"fixed_delay"``, ``"exponential"`` or ``"failure_rate"``.
    """

    strategy: Literal["none", "fixed_delay", "exponential", "failure_rate"] = "exponential"
    """``"none"``: the first failure ends the job."""
    delay_ms: float = 0.0
    """fixed_delay, failure_rate: pause before a restart."""
    attempts: int = 10
    """fixed_delay: restarts before the job fails for good."""
    initial_ms: float = 50.0
    """exponential: pause before the first restart."""
    max_ms: float = 60_000.0
    """exponential: longest pause."""
    multiplier: float = 2.0
    """exponential: factor from one pause to the next."""
    jitter: float = 0.1
    """exponential: share of the pause that is random."""
    reset_ms: float = 60_000.0
    """exponential: running that long without a failure resets the pause to ``initial_ms``."""
    rate_failures: int = 10
    """failure_rate: more failures than this within ``rate_window_ms`` fail the job."""
    rate_window_ms: float = 60_000.0
    """failure_rate: the time in which failures are counted."""
    max_consecutive: int = 12
    """exponential: failures in a row without one completed checkpoint in between before the job fails for good."""


class JobConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of one job."""

    # -- checkpoints
    protocol: ProtocolName = "aligned"
    """What the job promises and how it keeps it; see the guide on checkpoints."""
    interval_ms: float = 10_000.0
    """Between the triggers of two checkpoints."""
    min_pause_ms: float = 0.0
    """Pause between the END of one checkpoint and the trigger of the next."""
    timeout_ms: float = 600_000.0
    """A checkpoint that takes longer is aborted."""
    max_concurrent: int = 1
    """Checkpoints under way at once."""
    tolerable_failed: int = 0
    """Consecutive failed checkpoints that do not fail the job."""
    num_retained: int = 3
    """Completed checkpoints that are kept."""
    aligned_timeout_ms: float | None = None
    """Protocol ``unaligned``: how long a checkpoint aligns before its barriers overtake; 0 or ``None``: not at all."""
    incremental: bool = True
    """A checkpoint writes what changed since the last completed one, and names that one's files for the rest."""
    inline_threshold_bytes: int = 20_480
    """State below this size travels inside the acknowledgement and lies in the manifest."""
    key_file: str | None = None
    """File with the key that seals log, manifests, state and staged output; ``None``: ``CUTWATER_KEY_FILE`` or
    ``CUTWATER_KEY`` of the environment, and without them no key; see the guide on security."""
    accept_unsealed: bool = False
    """With a key: what nobody sealed is read all the same, for the one start that turns the key on."""
    file_access: FileAccess = "owner"
    """Who may read and write the files of the job's state: ``"owner"``, or the ``"group"`` of the owner, too."""
    # -- state
    state_backend: StateBackend = "memory"
    """Where keyed state lies: ``"memory"``, or ``"rocksdb"``, on the worker's disk, for more than memory
    holds; see the guide on state larger than memory."""
    state_memory_bytes: int = 1 << 28
    """Backend ``rocksdb``: of each step with state, so much lies in a worker's memory, roughly; at least 1048576,
    which is 1 MiB."""
    # -- parallelism
    parallelism: int = 2
    """Workers, and subtasks of every step that does not say otherwise."""
    max_parallelism: int = 128
    """Key groups; fixed for the life of the state."""
    scheduler: SchedulerName | None = None
    """``"adaptive"``: where Spark's cores stay lost for ``resource_stabilization_timeout`` the job goes on with fewer
    workers, and with more as soon as they come back, up to ``parallelism``; see the guide on rescaling.  ``None``:
    ``"adaptive"`` unless the master is a local one, or the job has no checkpoints or a ``trace_dir``."""
    min_parallelism: int = 1
    """Scheduler ``adaptive``: with less the job waits."""
    resource_stabilization_timeout_ms: float = 10_000.0
    """Scheduler ``adaptive``: how long the workers that are there must be all that come before the job goes on with
    fewer, or with a part of those that it lacked."""
    resource_timeout_ms: float | None = None
    """A job that waits for cores fails if none came for so long.  ``None``: it waits, and the status says for what."""
    rescale_timeout_ms: float = 300_000.0
    """A rescale waits so long for cores and workers, from the last one that came; the job runs on meanwhile."""
    # -- data path
    batch_rows: int = 65_536
    """A sender's builder flushes at this many rows; operators are called with at most twice as many."""
    buffer_timeout_ms: float = 2.0
    """A sender's builder flushes at the latest after this time; at once if its worker has nothing else to do."""
    channel_frames: int = 8
    """Frames a channel holds at the receiver (its credit); in loops, and on the way into one, at most 2."""
    slice_budget_ms: float = 10.0
    """Time one call of an operator should take; rows per call adapt to it. Where a call costs so much whatever the
    number of its rows that nothing would move, calls get more rows and last longer, up to ``max_call_ms``."""
    max_call_ms: float = 1_000.0
    """Longest call of an operator, which a barrier may have to wait for: what a call costs whatever the number of its
    rows, and the rows. A step whose calls cost more than that without any row exceeds it."""
    max_frame_bytes: int = 1 << 30
    """A frame above this size is an error."""
    spill: bool = False
    """An input that is blocked for an aligned checkpoint does not hold its sender up: what does not fit in memory waits
    on the worker's disk (its temporary directory)."""
    spill_memory_bytes: int = 1 << 24
    """Of each channel that may overflow to disk, so much waits in memory: back-edges, and with ``spill`` all."""
    trace_dir: str | None = None
    """Directory into which every worker, and the driver, write what they do, for ``cutwater check-trace`` and
    ``cutwater diagram``: numbers of rows, no contents. ``None``: nothing is written, and costs nothing."""
    worker_log_level: LogLevelName = "warning"
    """What is logged in a worker below this level stays there; the rest comes to the driver, to the logger
    `cutwater.worker`; see the guide on logging."""
    # -- membership
    boot_timeout_ms: float = 180_000.0
    """A worker that has a core must have started Python and joined within this time; else Spark ends it, and it is
    started anew, on another machine if there is one."""
    heartbeat_interval_ms: float = 1_000.0
    """Between two signs of life of a worker."""
    heartbeat_timeout_ms: float = 10_000.0
    """A worker silent for so long is lost, and replaced."""
    cancel_timeout_ms: float = 5_000.0
    """Time that workers get to end by themselves before Spark kills them."""
    # -- recovery
    recovery: RecoveryName = "job"
    """What goes back to the last checkpoint after a failure: ``"job"``, everything; ``"region"``, only the parts of
    the dataflow that are connected with what failed; ``"upstream"``, what failed and all that it gets its rows from; or
    ``"task"``, only what lived in the worker that failed; see the guide on checkpoints."""
    replay_memory_bytes: int = 1 << 26
    """With ``recovery="task"``: of what a channel sent since the last checkpoint, so much is kept in memory for a
    receiver that goes back; the rest lies on the worker's disk (its temporary directory). So much more is sent after a
    loss before the sender waits for the replacement."""
    catch_up_timeout_ms: float = 600_000.0
    """With ``recovery="upstream"`` or ``"task"``: no checkpoint begins until what went back has sent again what the
    others have; if it has not after so long, everything goes back."""
    state_replicas: int = 0
    """Other workers, on other machines if there are, that hold in memory what each worker wrote of the newest
    checkpoint, so that its restore need not read the checkpoint directory; see the guide on checkpoints."""
    replica_memory_bytes: int = 1 << 30
    """With ``state_replicas``: so much a worker holds for others, and for itself where it has no local copies; what
    does not fit is read from the checkpoint directory."""
    local_copies_dir: str | None = None
    """Directory on each worker's machine that keeps copies of what its worker wrote of the newest checkpoint; of no
    use on the disk that the checkpoints lie on, and then not used. ``None``: no local copies."""
    local_copies_bytes: int = 1 << 32
    """With ``local_copies_dir``: so much a worker keeps there; what does not fit is read from the checkpoint
    directory."""
    restart: RestartConfig = RestartConfig()
    """When and how often a failed job is restarted."""

    def __post_init__(self) -> None:
        above_0 = ("interval_ms", "timeout_ms", "buffer_timeout_ms", "slice_budget_ms", "boot_timeout_ms")
        for name in (*above_0, "catch_up_timeout_ms", "rescale_timeout_ms", "max_call_ms", "resource_timeout_ms"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be above 0, got {value}")
        for name in ("aligned_timeout_ms", "spill_memory_bytes", "replay_memory_bytes", "tolerable_failed"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name} must be at least 0, got {value}")
        counts = ("parallelism", "max_parallelism", "max_concurrent", "num_retained", "batch_rows", "channel_frames")
        for name in (*counts, "replica_memory_bytes", "local_copies_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.parallelism > self.max_parallelism:
            raise ConfigError(
                f"parallelism {self.parallelism} is above max_parallelism {self.max_parallelism}",
                hint="Key groups are the unit of scaling: raise max_parallelism before the first run, or lower this.",
            )
        if not 1 <= self.min_parallelism <= self.parallelism:
            raise ConfigError(
                f"min_parallelism {self.min_parallelism} is not between 1 and parallelism {self.parallelism}"
            )
        if self.scheduler == "adaptive" and self.protocol == "none":
            raise ConfigError(
                "scheduler 'adaptive' needs checkpoints to go on from, and protocol 'none' keeps none",
                hint="Choose another protocol, at_least_once for example.",
            )
        if self.scheduler == "adaptive" and self.trace_dir is not None:
            raise ConfigError(
                "a trace tells of one parallelism, and scheduler 'adaptive' changes it",
                hint="Leave trace_dir out, or the scheduler.",
            )
        if self.protocol in ("unaligned", "synchronous") and self.max_concurrent > 1:
            raise ConfigError(
                f"protocol {self.protocol!r} takes one checkpoint at a time, "
                f"but max_concurrent is {self.max_concurrent}",
                hint="Leave max_concurrent at 1, or choose protocol 'aligned' or 'chandy_lamport'.",
            )
        if self.state_memory_bytes < 1 << 20:
            raise ConfigError(
                f"state_memory_bytes must be at least {1 << 20} (1 MiB), got {self.state_memory_bytes}",
                hint="It is what each step keeps of its state in memory; the rest lies on disk.",
            )
        if self.records_order and self.protocol in ("none", "at_least_once"):
            raise ConfigError(
                f"recovery {self.recovery!r} needs a checkpoint that is a cut, protocol {self.protocol!r} takes none",
                hint="Choose protocol 'aligned' or 'unaligned', or recovery='job'.",
            )
        if self.recovery != "job" and self.trace_dir is not None:
            raise ConfigError(
                f"a trace shows recoveries of the whole job only, but recovery is {self.recovery!r}",
                hint="Leave trace_dir out, or set recovery='job' while you look at traces.",
            )
        self._check_copies()

    def _check_copies(self) -> None:
        if not 0 <= self.state_replicas < max(1, self.parallelism):
            raise ConfigError(
                f"state_replicas must be between 0 and {self.parallelism - 1}, the number of other workers, "
                f"got {self.state_replicas}"
            )
        if self.protocol == "none" and self.keeps_copies:
            raise ConfigError(
                "protocol 'none' goes back to nothing after a failure, so copies of its snapshots are of no use",
                hint="Leave state_replicas and local_copies_dir out, or choose another protocol.",
            )

    @property
    def keeps_copies(self) -> bool:
        """Whether workers keep copies of what they write, for themselves or for each other."""
        return self.state_replicas > 0 or self.local_copies_dir is not None

    @property
    def tracks_changes(self) -> bool:
        """Whether steps note what changes between checkpoints: in vain where only the end of the job has one."""
        return self.incremental and self.protocol != "none"

    @property
    def records_order(self) -> bool:
        """Whether subtasks log in which order they do things: only where a recovery makes some of it once more (R0)."""
        return self.recovery not in ("job", "region")

    def on_master(self, local: bool) -> JobConfig:
        """With a scheduler, if none was chosen: cores are lost and come back on a cluster, not in a local session.

        >>> JobConfig().on_master(False).scheduler, JobConfig(protocol="none").on_master(False).scheduler
        ('adaptive', 'default')
        """
        if self.scheduler is not None:
            return self
        can_adapt = self.protocol != "none" and self.trace_dir is None
        return self.replace(scheduler="adaptive" if can_adapt and not local else "default")

    def replace(self, **changes: Any) -> JobConfig:
        """A copy with some settings changed.

        >>> JobConfig().replace(parallelism=4).parallelism
        4
        """
        return msgspec.structs.replace(self, **changes)


prepare(JobConfig)
