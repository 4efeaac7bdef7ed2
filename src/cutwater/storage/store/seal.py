"""Digests and seals: how bytes are known to be those that were written.

Without a key a digest is xxh3_128 in hex: it finds damage, and anybody can make one.  With a key it is a *seal*,

    hs256:<id of the key>:<HMAC-SHA256, hex>

which only those who have the key can make.  What kind of thing is sealed is part of it, so that a sealed segment is no
sealed log entry.  A log entry seals the manifest that it names, and that one its segments and the handles of sinks: so
one seal that is checked before anything is decoded vouches for everything behind it.

The id of a key tells keys apart and tells nothing else of them.  The first key seals; all others are of earlier times,
and what they sealed is still read.

Keys come from a file or the environment, never from an argument or a setting.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import xxhash

from cutwater.errors import ConfigError, SealError

Kind: TypeAlias = Literal["log", "manifest", "segment", "savepoint", "file", "piece", "part", "input", "request"]
"""Kinds of sealed things: one cannot stand in for another."""

_PREFIX = "hs256:"
_ID_CHARS = 8
_KEY_BYTES_MIN = 16
_DIGEST_HEX = 32


class Hasher(Protocol):
    """Takes bytes, piece by piece, and tells their digest."""

    def update(self, data: Any, /) -> None:
        """The next bytes."""
        ...

    def hexdigest(self) -> str:
        """Of all bytes so far."""
        ...


def is_sealed(digest: str) -> bool:
    """True if a digest is a seal, of whatever key.

    >>> is_sealed("hs256:1f2e3d4c:00"), is_sealed("99aa06d3014798d86001c324468d497f")
    (True, False)
    """
    return digest.startswith(_PREFIX)


class _Key:
    """A key, and those made of it for each kind."""

    def __init__(self, value: bytes) -> None:
        if len(value) < _KEY_BYTES_MIN:
            raise ConfigError(
                f"a key has at least {_KEY_BYTES_MIN} characters, got {len(value)}",
                hint="Make one: python3 -c 'import secrets; print(secrets.token_hex(32))'.",
            )
        self.value = value
        self.id = hmac.new(value, b"cutwater key id", hashlib.sha256).hexdigest()[:_ID_CHARS]
        self._of_kind: dict[str, bytes] = {}

    def hasher(self, kind: Kind) -> _SealHasher:
        derived = self._of_kind.get(kind)
        if derived is None:
            derived = hmac.new(self.value, f"cutwater {kind}".encode(), hashlib.sha256).digest()
            self._of_kind[kind] = derived
        return _SealHasher(self.id, derived)


class _SealHasher:
    def __init__(self, id: str, key: bytes) -> None:
        self._id, self._mac = id, hmac.new(key, digestmod=hashlib.sha256)

    def update(self, data: Any, /) -> None:
        self._mac.update(data)

    def hexdigest(self) -> str:
        return f"{_PREFIX}{self._id}:{self._mac.hexdigest()}"


class Seal:
    """Makes digests, and compares them.

    Args:
        keys: the first seals; all are accepted.  None: digests without a key.
        accept_unsealed: with keys, digests without one are accepted as well.

    Raises:
        ConfigError: a key is too short.

    >>> seal = Seal([b"0123456789abcdef"])
    >>> digest = seal.digest("log", b"entry")
    >>> seal.problem("log", b"entry", digest)
    ''
    >>> seal.problem("log", b"another", digest)
    'it was changed by somebody who does not have the key, or is damaged'
    >>> PLAIN.problem("log", b"another", PLAIN.digest("log", b"entry"))
    'expected digest e33ec482dcfc2b4a96751effb3a775d8, found 057d597e4890d2b9fd5469fcd5f0a162'
    """

    def __init__(self, keys: Sequence[bytes] = (), *, accept_unsealed: bool = False) -> None:
        self._keys = [_Key(value) for value in keys]
        self._accept_unsealed, self._accept_unknown = accept_unsealed, False

    def __repr__(self) -> str:
        return f"Seal({', '.join(self.key_ids) or 'no key'})"

    def __reduce__(self) -> tuple[object, ...]:
        if self.keyed:
            raise TypeError("a key is never part of what is shipped or stored")
        return Seal, ()

    @property
    def keyed(self) -> bool:
        """True if there is a key."""
        return bool(self._keys)

    @property
    def refuses_unsealed(self) -> bool:
        """True if there is a key, and what nobody sealed is not read."""
        return self.keyed and not self._accept_unsealed

    @property
    def key_ids(self) -> list[str]:
        """Ids of the keys, the one that seals first."""
        return [key.id for key in self._keys]

    def reveal(self) -> tuple[list[bytes], bool]:
        """The keys, and whether digests without one are accepted."""
        return [key.value for key in self._keys], self._accept_unsealed

    def accepting_unsealed(self) -> Seal:
        """The same, which reads what nobody sealed as well."""
        return Seal([key.value for key in self._keys], accept_unsealed=True)

    def for_links(self) -> Seal:
        """The same for what nothing is taken from: what an unknown key sealed, or none, is as good as any."""
        made = self.accepting_unsealed() if self.keyed else Seal()
        made._accept_unknown = self.keyed
        return made

    def hasher(self, kind: Kind) -> Hasher:
        """Makes the digest of something that is written."""
        return self._keys[0].hasher(kind) if self._keys else xxhash.xxh3_128()

    def digest(self, kind: Kind, data: Any) -> str:
        """The digest of bytes that are there."""
        hasher = self.hasher(kind)
        hasher.update(data)
        return hasher.hexdigest()

    def is_current(self, digest: str) -> bool:
        """True if the key that seals now made it; without a key, if none did."""
        return digest.startswith(f"{_PREFIX}{self._keys[0].id}:") if self._keys else not is_sealed(digest)

    def problem(self, kind: Kind, data: Any, digest: str, what: str = "", step: str | None = None) -> str:
        """The fault of bytes that are to have this digest; empty if there is none.

        Of a seal that differs the right one is not told: whoever reads messages could make use of it.

        Raises:
            SealError: there is no way to tell: no key is known that made the seal, or nobody sealed them.
        """
        try:
            hasher = self._hasher_of(kind, digest)
        except SealError as error:
            if self._accept_unknown:
                return ""
            if not what:
                raise
            raise SealError(f"{what}: {error.message}", hint=error.hint, step=step) from error
        hasher.update(data)
        found = hasher.hexdigest()
        if hmac.compare_digest(found.encode(), digest.encode()):
            return ""
        if is_sealed(digest):
            return "it was changed by somebody who does not have the key, or is damaged"
        return f"expected digest {digest[:_DIGEST_HEX]}, found {found}"

    def _hasher_of(self, kind: Kind, digest: str) -> Hasher:
        if not is_sealed(digest):
            if self.refuses_unsealed:
                raise SealError(
                    "it is not sealed with the job's key: somebody changed it, or it was written without a key",
                    hint="If it is yours and was written before there was a key, start once with accept_unsealed=True.",
                )
            return xxhash.xxh3_128()
        id = digest.removeprefix(_PREFIX).partition(":")[0]
        for key in self._keys:
            if key.id == id:
                return key.hasher(kind)
        if not self._keys:
            raise SealError(
                f"it is sealed with key {id[:_ID_CHARS]!r}, and no key was given",
                hint="Set CUTWATER_KEY_FILE to the file with the job's key.",
            )
        raise SealError(
            f"it is sealed with key {id[:_ID_CHARS]!r}; the key given is {self._keys[0].id!r}",
            hint="Give the key that it was written with, or add that one to the key file as a further line.",
        )


PLAIN = Seal()
"""Digests without a key."""


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
    """The environment's word: the key itself, or the file that holds it.

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
