"""The files of one run, put together: of several workers and of several attempts.

Each process writes for itself, so that a file knows only what happened in one place; and whoever wrote it may have been
killed meanwhile, so that its last line may be torn.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from cutwater.errors import ConfigError, DataError
from cutwater.trace.events import Crashed, Event, Header, Restored, Trace, read_trace
from cutwater.trace.order import causal_order

SUFFIX = ".jsonl"
"""Of the files that are read from a directory."""


def read_run(paths: Iterable[str | os.PathLike[str]]) -> Trace:
    """One trace from files, or from directories of them.

    The events come in a causal order (``order.causal_order``); times only decide where nothing else does.  A process
    that goes on in a new attempt lost what it had: where that begins, a ``Crashed`` is put in unless there is one.

    Raises:
        ConfigError: the files are of different runs, or of one run before and after its graph changed.
        DataError: a file is no trace, or no order exists.
        FormatVersionError: a file is of another format version.
    """
    files = [file for path in paths for file in _files(Path(path))]
    whole = len(files) == 1
    parts = [(file, read_trace(file, unfinished=True)) for file in files if whole or _begun(file)]
    if not parts:
        raise DataError("nothing was traced", hint=f"The directory should hold files NAME{SUFFIX}.")
    first, header = parts[0][0], parts[0][1].header
    for file, part in parts:
        if part.header != header:
            raise ConfigError(f"{file} and {first} are of different runs", hint="Name the files of one run.")
    if whole:
        return parts[0][1]
    attempts = sorted(
        (part.events for _, part in parts), key=lambda events: max((e.attempt for e in events), default=0)
    )
    return Trace(header, tuple(causal_order(header, _with_crashes(header, attempts))))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(path.glob(f"*{SUFFIX}"))
    if not found:
        raise DataError(f"{path} holds no trace", hint=f"Their names end in {SUFFIX}.")
    return found


def _begun(file: Path) -> bool:
    """It has its first line; whoever was to write it was not killed before."""
    try:
        with file.open("rb") as stream:
            return stream.readline().endswith(b"\n")
    except OSError:
        return True  # reading it says what is wrong


def _with_crashes(header: Header, attempts: Sequence[Sequence[Event]]) -> list[Event]:
    last: dict[str, Event] = {}
    found: list[Event] = []
    for event in (event for events in attempts for event in events):
        before = last.get(event.process)
        if isinstance(event, Restored) and before is not None and not isinstance(before, Crashed):
            found.append(Crashed(max(before.time_ms, event.time_ms), event.process, before.attempt))
        found.append(event)
        if event.process in header.processes:
            last[event.process] = event
    return found
