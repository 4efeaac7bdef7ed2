"""The manifest: what a checkpoint consists of.  Written once, its digest lies in the job log."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from cutwater.data.decoding import prepare
from cutwater.data.time import MIN_WATERMARK
from cutwater.errors import DataError

KNOWN_VERSIONS = (1, 2, 3, 4, 5, 6)
"""6: sealed, with splits in blocks.  5: splits may lie in blocks.  4: sealed.  3: segments may be unsorted.
2: entries may name files of older checkpoints, and hold deletions.  1: each checkpoint is whole."""
SEALED_VERSIONS = (4, 6)


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """Place of one segment: a byte range of a file, or inline."""

    step: str
    subtask: int
    name: str
    kind: str
    rows: int
    length: int
    digest: str
    """Of the bytes: xxh3_128, hex, or a seal."""
    key_groups: tuple[int, int] | None = None
    file: str = ""
    """Relative to the job's folder; empty for inline."""
    offset: int = 0
    inline: bytes | None = None
    format: str = "arrow-ipc/1"
    channel: tuple[int, int, int] | None = None
    """Of kind "channel", rows on their way: edge, sending subtask, receiving subtask.  ``name`` is the edge's name."""
    side: str = ""
    """"receiver": taken or waiting there; "sender": waiting at the sender, behind those of the receiver."""
    first_row: int = 0
    """Number of the first row in its channel."""
    ungrouped: tuple[int, int] | None = None
    """Of an unsorted segment, see ``cutwater.state.segments.Segment``."""
    schema: bytes = b""
    """Of format "arrow-file/1", a record batch within a file of a savepoint: the file's schema."""
    written: int = 0
    """The checkpoint that wrote it, where that went on with a shared file of an earlier one."""


class ChannelRecord(msgspec.Struct, frozen=True):
    """An input channel at the cut: number of the next row, watermark, idleness, end of data."""

    edge: int
    source: int
    target: int
    next_row: int
    watermark: int
    idle: bool = False
    ended: bool = False


class SplitRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A source split at the cut."""

    id: str
    data: Any = None
    position: Any = None
    max_time: int = MIN_WATERMARK
    """Largest event time read so far (microseconds): the split's watermark follows from it.  Of a split that was found
    when time had passed already, what it is taken to be."""
    done: bool = False
    idle: bool = False
    """It gave nothing for the idle timeout: nobody waits for it."""


class SubtaskRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything about one subtask at the cut that is not a segment."""

    vertex: int
    subtask: int
    incarnation: int
    protocol: str
    inputs: list[ChannelRecord] = []
    output_rows: list[ChannelRecord] = []
    """Number of the next row on each output channel (watermark: the last sent)."""
    splits: dict[str, list[SplitRecord]] = {}
    """Per read step."""
    packed: dict[str, list[bytes]] = {}
    """Per read step: blocks of splits (``packed_splits``) that come before ``splits``; whoever loads a manifest gets
    them there."""
    handles: dict[str, list[Any]] = {}
    """Per write step: pre-commit handles."""
    sinks: dict[str, Any] = {}
    """Per write step: the writer's state."""
    processing_time_ms: int = 0
    watermark: int = MIN_WATERMARK
    finished: bool = False
    """End of data was handled: the subtask's work is done."""


class Shape(enum.StrEnum):
    """Form of the rows of a table, in its segments."""

    AGGREGATES = "aggregates"
    """Keys (and window), then accumulators."""
    TABLE = "table"
    """Keys, then values as they are."""
    TOP = "top"
    """Keys, then the list of rows that are kept."""
    ROWS = "rows"
    """Whole rows; none replaces another."""
    OBJECT = "object"
    """Keys, then a value of user logic."""
    ELEMENTS = "elements"
    """Operator state: elements of subtasks."""
    TIMERS = "timers"
    WATERMARKS = "watermarks"
    REQUESTS = "requests"
    """Rows without key group."""
    CHANNEL = "channel"
    POSITIONS = "positions"
    HANDLES = "handles"


class TableRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A table of a step's state, as a reader shows it."""

    segments: str
    """Name of its segments."""
    name: str = ""
    """Of the table, if it is not that of its segments."""
    shape: str = Shape.TABLE
    """One of ``Shape``: those for states."""
    keys: list[str] = []
    """Key columns, if they are not those of the step."""
    main: bool = True
    """The name of the step alone may mean it."""
    period: tuple[int, int, int] | None = None
    """Of windows that begin at the same places for every key: size, distance, offset, in microseconds."""


class StepRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A step, as the upgrade check needs to know it."""

    id: str
    kind: str
    parallelism: int
    keys: list[str] = []
    outputs: list[list[tuple[str, str]]] = []
    """Per output: (column, type)."""
    state: list[tuple[str, str]] | None = None
    settings: dict[str, str] = {}
    """Settings that the meaning of the state depends on: aggregates, windows, bounds."""
    types: bytes = b""
    """``state`` as an Arrow IPC schema; older releases wrote it of steps whose state may evolve only."""
    parts: list[tuple[str, str]] = []
    """Of aggregates and user logic, in order: name of an aggregate or state, and which function or kind it is."""
    vertex: int = -1
    """Number of the chain that the step lies in."""
    tables: list[TableRecord] = []
    """Tables of the state; older releases did not tell."""


class EdgeRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """An edge: what it is called, and the columns of the rows that go over it."""

    name: str
    columns: list[tuple[str, str]] = []
    """(column, type)."""


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A completed checkpoint."""

    job: str
    uid: str
    """Of the job: made at its first start, the same over all drivers and attempts."""
    checkpoint_id: int
    attempt: int
    protocol: str
    max_parallelism: int
    parallelism: int
    triggered_ms: int
    completed_ms: int
    steps: list[StepRecord]
    subtasks: list[SubtaskRecord]
    entries: list[Entry]
    edges: list[EdgeRecord] = []
    """By number."""
    back_edges: list[tuple[str, str]] = []
    final: bool = False
    """Nothing is left to do: a restore of it reruns nothing (A7)."""
    engine: str = ""
    format_version: int = 1
    """Raised by ``dumps_manifest`` where the content needs it: older releases go on reading what they can."""


prepare(Manifest)


def encoded(manifest: msgspec.Struct, what: str) -> bytes:
    """A manifest, or a part of one, as JSON, always the same.

    Raises:
        DataError: a position, handle or split description is no JSON value.
    """
    try:
        return msgspec.json.encode(manifest, order="deterministic")
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{what}: a position or handle cannot be written as JSON ({error})",
            hint="Connectors must use numbers, texts, lists and dictionaries for positions, handles and states.",
        ) from error
