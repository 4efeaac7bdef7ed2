"""Names inside a checkpoint directory: the one place that knows how files are called and where they lie.

<directory>/<job>/log/              the job log
<directory>/<job>/chk-<id>/         files of one checkpoint
<directory>/<job>/shared/           data that later checkpoints may name, too
<directory>/<job>/input/<step>/     what was staged of a DataFrame
<directory>/<job>/output/<step>/    what a sink stages beside the job, or keeps for the driver
<directory>/<job>/shadow/<step>/    what the sinks of a fork would have been given
<directory>/<job>/control/          signs of life, requests and answers
<directory>/<job>/claim.json        the savepoint that the job has taken over
<directory>/savepoints/             savepoints of a hand-over, unless another place is named
"""

from __future__ import annotations

import functools
import re
import uuid

from cutwater.errors import ConfigError

LOG_FOLDER = "log"
SHARED_FOLDER = "shared"
"""Data that later checkpoints may name, too."""

SAVEPOINT_FILE = "savepoint.json"
"""Manifest of a savepoint, in its folder."""
SAVEPOINTS_FOLDER = "savepoints"
"""In the checkpoint directory."""

INPUT_FOLDER = "input"
SHADOW_FOLDER = "shadow"
CONTROL_FOLDER = "control"
CLAIM_FILE = "claim.json"
SIGN_FILE = "driver.json"

_JOB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\- ]*")
_CHECKPOINT = re.compile(r"chk-([1-9][0-9]{0,17})")
_LOG_ENTRY = re.compile(r"([0-9]{12})\.json")
_DATA = re.compile(r"([0-9]{1,18})-[0-9]{1,18}\.data")
_SHARED = re.compile(r"([0-9]{1,18})-([0-9]{1,18})-[0-9]{1,18}\.data")
_MANIFEST = re.compile(r"manifest-([0-9]{1,18})\.json")


def savepoint_folder(job: str) -> str:
    """Folder of a new savepoint, in the directory that the user names."""
    return f"savepoint-{job}-{uuid.uuid4().hex[:12]}"


def input_folder(job: str, step: str) -> str:
    """Folder of what was staged of a DataFrame.

    >>> input_folder("delays", "rides")
    'delays/input/rides'
    """
    return f"{job}/{INPUT_FOLDER}/{step}"


def output_folder(job: str, step: str) -> str:
    """Folder of a sink that stages beside the job, or keeps its rows for the driver."""
    return f"{job}/output/{step}"


def shadow_folder(job: str) -> str:
    """Folder of what the sinks of a fork would have been given, with a folder for each step."""
    return f"{job}/{SHADOW_FOLDER}"


def control_folder(job: str) -> str:
    """Folder of what processes tell each other of a job."""
    return f"{job}/{CONTROL_FOLDER}"


def sign_path(job: str) -> str:
    """The file in which a driver says that it lives."""
    return f"{control_folder(job)}/{SIGN_FILE}"


def request_paths(job: str, id: str) -> tuple[str, str, str]:
    """Of one request to a driver: itself, who took it, and the answer.

    >>> request_paths("delays", "7f")
    ('delays/control/7f-request.json', 'delays/control/7f-claim.json', 'delays/control/7f-done.json')
    """
    request, claim, done = (f"{control_folder(job)}/{id}-{part}.json" for part in ("request", "claim", "done"))
    return request, claim, done


def check_job_name(job: str) -> str:
    """The name back, if it can be a folder's name.

    Raises:
        ConfigError: it is empty, leads out of the checkpoint directory, or is hidden from Spark's readers.

    >>> check_job_name("delays")
    'delays'
    """
    if not _JOB_NAME.fullmatch(job):
        raise ConfigError(
            f"job name {job!r} cannot name a folder",
            hint="Use letters, digits, '_', '-', '.' and spaces, and begin with a letter or digit.",
        )
    return job


def checkpoint_folder(checkpoint_id: int) -> str:
    """Folder of a checkpoint, relative to the job's.

    >>> checkpoint_folder(7)
    'chk-7'
    """
    return f"chk-{checkpoint_id}"


def checkpoint_id_of(folder: str) -> int | None:
    """The id in a checkpoint folder's name, ``None`` for other names.

    >>> checkpoint_id_of("chk-7"), checkpoint_id_of("log")
    (7, None)
    """
    found = _CHECKPOINT.fullmatch(folder)
    return int(found[1]) if found else None


def data_path(checkpoint_id: int, attempt: int, incarnation: int) -> str:
    """Data file of one worker in one checkpoint, relative to the job's folder."""
    return f"{checkpoint_folder(checkpoint_id)}/{attempt}-{incarnation}.data"


def shared_path(checkpoint_id: int, attempt: int, incarnation: int) -> str:
    """Data file of one worker that was written for one checkpoint and may outlive it, relative to the job's folder.

    >>> shared_path(7, 1, 0)
    'shared/7-1-0.data'
    """
    return f"{SHARED_FOLDER}/{checkpoint_id}-{attempt}-{incarnation}.data"


@functools.lru_cache(maxsize=1024)  # asked several times for each entry of each checkpoint
def writer_of_shared(file: str) -> tuple[int, int] | None:
    """Checkpoint and attempt that a shared file (with its folder) was written for; ``None`` for other names.

    >>> writer_of_shared("shared/7-1-0.data"), writer_of_shared("chk-7/1-0.data")
    ((7, 1), None)
    """
    folder, _, name = file.partition("/")
    found = _SHARED.fullmatch(name) if folder == SHARED_FOLDER else None
    return (int(found[1]), int(found[2])) if found else None


def is_data_path(file: str) -> bool:
    """True if a file, relative to the job's folder, is a data file of a checkpoint.

    >>> is_data_path("chk-7/1-0.data"), is_data_path("shared/7-1-0.data"), is_data_path("chk-7/../../x")
    (True, True, False)
    """
    folder, _, name = file.partition("/")
    if folder == SHARED_FOLDER:
        return _SHARED.fullmatch(name) is not None
    return checkpoint_id_of(folder) is not None and _DATA.fullmatch(name) is not None


def manifest_path(checkpoint_id: int, attempt: int) -> str:
    """A manifest that is too large for the log, relative to the job's folder.

    The attempt in it keeps a paused predecessor off this attempt's path.
    """
    return f"{checkpoint_folder(checkpoint_id)}/manifest-{attempt}.json"


def attempt_of(file: str) -> int | None:
    """The attempt that wrote a file of a checkpoint folder (name without folder); ``None`` for foreign names.

    >>> attempt_of("3-12.data"), attempt_of("manifest-3.json"), attempt_of("notes.txt")
    (3, 3, None)
    """
    found = _DATA.fullmatch(file) or _MANIFEST.fullmatch(file)
    return int(found[1]) if found else None


def log_path(seq: int) -> str:
    """Log entry, relative to the job's folder.

    >>> log_path(12)
    'log/000000000012.json'
    """
    return f"{LOG_FOLDER}/{seq:012d}.json"


def entry_at(path: str) -> int | None:
    """The number of the log entry at a path relative to the job's folder, ``None`` for other files.

    >>> entry_at("log/000000000012.json"), entry_at("chk-7/manifest-1.json")
    (12, None)
    """
    folder, _, name = path.partition("/")
    return log_seq_of(name) if folder == LOG_FOLDER else None


def log_seq_of(file: str) -> int | None:
    """The number of a log entry's file name (without folder), ``None`` for other names."""
    found = _LOG_ENTRY.fullmatch(file)
    return int(found[1]) if found else None
