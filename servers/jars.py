"""Fetches the Java libraries that a lock file names from Maven Central, each checked against its digest."""

from __future__ import annotations

import hashlib
import os
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["CENTRAL", "FetchError", "fetched"]

CENTRAL = os.environ.get("MAVEN_REPOSITORY", "https://repo1.maven.org/maven2")
HOME = Path(__file__).resolve().parent
FETCHED = HOME.parent / ".servers"
_TIMEOUT_S = 60.0


class FetchError(Exception):
    """A library cannot be had; says which and why."""


def fetched(name: str, locks: Path = HOME, into: Path = FETCHED) -> Path:
    """The folder with the libraries of ``<name>.lock``, fetched where they are missing.

    A line of the file is ``group:artifact:version sha256``.

    Args:
        name: of the file, and of the folder.
        locks: where the file is.
        into: where the folder is.

    Raises:
        FetchError: the repository cannot be reached, or a library is not what the lock file says.
    """
    folder = into / name
    wanted = [line.split() for line in (locks / f"{name}.lock").read_text().splitlines() if line and line[0] != "#"]
    missing = [(place, digest) for place, digest in wanted if not (folder / _file(place)).exists()]
    if missing:
        print(f"fetching {len(missing)} libraries of {name} into {folder.relative_to(HOME.parent)} (once)", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda one: _fetch(folder, *one), missing))
    return folder


def _file(place: str) -> str:
    _, artifact, version = place.split(":")
    return f"{artifact}-{version}.jar"


def _fetch(folder: Path, place: str, digest: str) -> None:
    group, artifact, version = place.split(":")
    url = f"{CENTRAL}/{group.replace('.', '/')}/{artifact}/{version}/{_file(place)}"
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            content = answer.read()
    except OSError as error:
        raise FetchError(f"cannot fetch {url}: {error} (another repository: MAVEN_REPOSITORY=...)") from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise FetchError(f"{url} is not what the lock file says")
    part = folder / f".{_file(place)}.{os.getpid()}"
    part.write_bytes(content)
    part.rename(folder / _file(place))
