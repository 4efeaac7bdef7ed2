"""Staged rows of a DataFrame: files in ``input/<step>``, each folder with a list of them and their digests.

The list lies in ``_staged.json`` of each folder that holds files: that of the step, or one for each batch of a stream.
With a key it is sealed, and the digests in it are SHA-256: so workers need no key to compare them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from cutwater.data.decoding import prepare
from cutwater.errors import CorruptSnapshotError, FormatVersionError
from cutwater.storage.store.base import Readable, Store
from cutwater.storage.store.paths import INPUT_FOLDER, input_folder
from cutwater.storage.store.seal import Seal, is_sealed

STAGED_FILE = "_staged.json"
_SHA = "sha256:"
_PIECE_BYTES = 1 << 24
STAGING = ".staging-"
"""In the name of a folder that is being filled, or that a driver died over."""


class Staged(msgspec.Struct, frozen=True, omit_defaults=True):
    """Files staged into one folder."""

    columns: str
    files: dict[str, int]
    """Sizes by name."""
    format: int = 1
    """2: with digests; a seal may follow in a second line."""
    digests: dict[str, str] = {}
    """By name: xxh3_128, hex; with a key SHA-256."""


prepare(Staged)


@dataclass(frozen=True, slots=True)
class StagedReport:
    """Result of reading what one step staged."""

    step: str
    files: int
    bytes: int
    problems: tuple[tuple[str, str], ...]
    """Path below the checkpoint directory, and what is wrong."""


def digest_maker(digest: str = "", *, keyed: bool = False) -> Any:
    """A hash of the kind that a digest is of, or that a new one is to be of."""
    return hashlib.sha256() if keyed or digest.startswith(_SHA) else xxhash.xxh3_128()


def digest_text(hasher: Any) -> str:
    """As it lies in the list."""
    return f"{_SHA if hasher.digest_size == 32 else ''}{hasher.hexdigest()}"


def sealed_staged(staged: Staged, seal: Seal) -> bytes:
    """The content of the list."""
    body = msgspec.json.encode(staged)
    return body + (b"\n" + seal.digest("input", body).encode() if seal.keyed else b"")


def is_sealed_list(data: bytes) -> bool:
    """True if a list says that it is sealed, with whatever key."""
    return is_sealed(data.partition(b"\n")[2].decode("ascii", errors="replace"))


def read_staged(path: str, data: bytes, seal: Seal) -> Staged:
    """The list in a file's bytes.

    Raises:
        CorruptSnapshotError: it is damaged.
        SealError: it is not sealed with the job's key.
        FormatVersionError: written by a newer release.
    """
    body, _, said = data.partition(b"\n")
    if (said or seal.refuses_unsealed) and seal.problem("input", body, said.decode("ascii", errors="replace"), path):
        raise CorruptSnapshotError(f"{path} is damaged, or was changed by somebody without the job's key")
    try:
        staged = msgspec.json.decode(body, type=Staged)
    except msgspec.MsgspecError as error:
        raise CorruptSnapshotError(f"{path} is damaged: {error}") from error
    if staged.format not in (1, 2):
        raise FormatVersionError(f"{path} has format {staged.format}, known are 1 and 2")
    if any("/" in name or not name.startswith("part-") for name in staged.files):
        raise CorruptSnapshotError(f"{path} names a file that Spark does not write")
    return staged


def differs(store: Readable, path: str, staged: Staged, name: str) -> str:
    """The fault of a staged file; empty if there is none.  Of lists without digests only the size is compared."""
    size, digest = staged.files[name], staged.digests.get(name, "")
    hasher = digest_maker(digest)
    try:
        for start in range(0, size, _PIECE_BYTES):
            hasher.update(store.read(path, start, min(_PIECE_BYTES, size - start)))
    except CorruptSnapshotError as error:
        return error.message
    if digest and digest_text(hasher) != digest:
        return f"{path} differs from its digest {digest}"
    return ""


def verify_inputs(store: Store, job: str) -> Iterator[StagedReport]:
    """Read all that a job staged, and compare it with its digests."""
    for step in store.names(f"{job}/{INPUT_FOLDER}"):
        top = input_folder(job, step)
        names = store.names(top)
        folders = [f"{top}/{n}" for n in names if n.startswith("batch-")]
        if STAGED_FILE in names or (any(n.startswith("part-") for n in names) and STAGING not in step):
            folders = [top]
        if folders:
            yield _report(store, step, folders)


def _report(store: Store, step: str, folders: list[str]) -> StagedReport:
    files = size = 0
    problems: list[tuple[str, str]] = []
    for folder in folders:
        path = f"{folder}/{STAGED_FILE}"
        if STAGED_FILE not in store.names(folder):
            if store.seal.refuses_unsealed:
                problems.append((path, f"{path} is missing: it was staged without a key, or somebody removed it"))
            continue  # of a release that wrote no lists
        try:
            staged = read_staged(path, bytes(store.read(path)), store.seal)
        except CorruptSnapshotError as error:
            problems.append((path, error.message))
            continue
        files, size = files + len(staged.files), size + sum(staged.files.values())
        found = ((f"{folder}/{name}", differs(store, f"{folder}/{name}", staged, name)) for name in staged.files)
        problems += [(file, what) for file, what in found if what]
    return StagedReport(step, files, size, tuple(problems))
