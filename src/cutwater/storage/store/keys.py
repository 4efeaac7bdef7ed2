"""Where the keys come from that seal a job's snapshots: a file, or the environment.  Never an argument or a setting."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from cutwater.errors import ConfigError
from cutwater.storage.store.seal import PLAIN, Seal

KEY_VARIABLE = "CUTWATER_KEY"
KEY_FILE_VARIABLE = "CUTWATER_KEY_FILE"

_FILE_BYTES_MAX = 1 << 16


def seal_of(key_file: str | None, *, accept_unsealed: bool = False) -> Seal:
    """The seal of a job.

    Args:
        key_file: the setting; ``None`` leaves it to the environment.
        accept_unsealed: what nobody sealed is read, too.

    Raises:
        ConfigError: the file cannot be read, or by everybody; a key is too short; or there is nothing to accept.
    """
    seal = environment_seal() if key_file is None else _from_file(key_file)
    if not accept_unsealed:
        return seal
    if not seal.keyed:
        raise ConfigError(
            "accept_unsealed is for a job with a key, and there is none",
            hint=f"Set {KEY_FILE_VARIABLE}, or leave accept_unsealed away.",
        )
    return seal.accepting_unsealed()


def environment_seal(environment: Mapping[str, str] = os.environ) -> Seal:
    """What the environment says: the key itself, or the file that holds it.

    Raises:
        ConfigError: it says both, or as ``seal_of``.
    """
    key, file = environment.get(KEY_VARIABLE, ""), environment.get(KEY_FILE_VARIABLE, "")
    if key and file:
        raise ConfigError(f"{KEY_VARIABLE} and {KEY_FILE_VARIABLE} are both set", hint="Leave one of them.")
    if file:
        return _from_file(file)
    return Seal([key.strip().encode()]) if key else PLAIN


def _from_file(path: str) -> Seal:
    """A key on each line, the one that seals first; lines that begin with ``#`` are notes."""
    try:
        with open(path, "rb", buffering=0, opener=_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"the key file {path} is not a file", hint="Give a file with one key on each line.")
            if status.st_mode & 0o027:
                raise ConfigError(
                    f"the key file {path} can be read by everybody, or written by others",
                    hint=f"chmod 600 {path}, and change the key if others may have seen it.",
                )
            data = file.read(_FILE_BYTES_MAX)
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read: {error.strerror}") from error
    keys = [line for line in map(bytes.strip, data.splitlines()) if line and not line.startswith(b"#")]
    if not keys:
        raise ConfigError(f"the key file {path} holds no key", hint="One key on each line, the one that seals first.")
    return Seal(keys)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
