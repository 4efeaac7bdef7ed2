"""The objects of one bucket, by obstore: requests that end, are tried again, and say what went wrong.

Tries of our own, and none of the library's: only who knows that a try may have reached the server can tell a refusal
by somebody else's object from one by its own (``Bucket.create``).
"""

from __future__ import annotations

import os
import random
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

import pyarrow as pa

from cutwater.errors import ConfigError, CorruptSnapshotError, InDoubtError, StorageError
from cutwater.storage.store.bucket_credentials import credentials_file

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

Scheme = Literal["s3", "gs", "az"]
PART_BYTES = 8 << 20
"""What is larger is written and read in pieces of this size."""
_PIECES_AT_ONCE = 4
_AT_ONCE_BYTES = _PIECES_AT_ONCE * PART_BYTES
_PREFIX = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
"""Of variables in the environment."""
_NONCE = "cutwaternonce"
"""Metadata of an object: which call of ``create`` made it."""

_T = TypeVar("_T")
_STATUS = re.compile(r"status code: ([1-5]\d\d)\b")
_CODE = re.compile(r"<Code>\s*([A-Za-z0-9.]{1,64})\s*</Code>")
_MESSAGE = re.compile(r"<Message>\s*([^<]{1,300}?)\s*</Message>")
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"})
_CONFLICT = 409
_NOT_NOW = frozenset({408, _CONFLICT, 425, 429})
"""Answers of a server that did not say no."""


@dataclass(frozen=True)
class Patience:
    """How long things may take, in seconds.

    Args:
        request_s: one request, its body included.
        connect_s: until a connection is there.
        total_s: all tries of one call; the last one may begin just before its end.
        pause_s, longest_pause_s: between two tries: doubled each time, less up to a half by chance.
    """

    request_s: float = 20.0
    connect_s: float = 5.0
    total_s: float = 45.0
    pause_s: float = 0.1
    longest_pause_s: float = 3.0


PATIENCE = Patience()


class ObjectInfo(NamedTuple):
    """What a listing says of an object."""

    key: str
    size: int
    tag: str
    """Changes with the content; empty if the server tells none."""
    modified_ns: int


class _Failure(NamedTuple):
    """What an error of the library means."""

    kind: Literal["missing", "no bucket", "denied", "expired", "refused", "unsafe", "not sent", "unknown"]
    """``unknown``: the server may do what was asked, now or later."""
    text: str
    status: int = 0


class Bucket:
    """One bucket.  Threads share it; a process that was forked needs one of its own.

    Args:
        scheme: whose.
        name: of the bucket; of ``az``, the container.
        patience: how long things may take.

    Raises:
        ConfigError: the library is missing, or the environment makes no sense to it.
        StorageError: of all methods: the bucket cannot be reached, read or written.
    """

    def __init__(self, scheme: Scheme, name: str, patience: Patience = PATIENCE) -> None:
        self.scheme, self.name, self._patience = scheme, name, patience
        self._client = self._connected()

    def address(self, key: str) -> str:
        """Of an object, for messages."""
        return f"{self.scheme}://{self.name}/{key}"

    # -- writing

    def create(self, key: str, data: bytes | memoryview) -> bool:
        """Make an object unless there is one; ``False`` if there is.

        A try whose answer got lost may have made it, so that the next one is refused by our own object: that one bears
        the nonce of this call.

        Raises:
            InDoubtError: the object may be there, or come yet.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        nonce, sent = secrets.token_hex(12), False

        def put(client: Client) -> bool:
            nonlocal sent
            try:
                obstore.put(client, key, data, mode="create", attributes={_NONCE: nonce}, use_multipart=False)
            except (AlreadyExistsError, PreconditionError) as error:
                if _failure(error).status != _CONFLICT:
                    return sent and _is_made_by(client, key, nonce, data)
                sent = True  # the library says that it exists; the server, that somebody is at it
                raise
            except Exception as error:
                sent = sent or _failure(error).kind == "unknown"
                raise
            return True

        try:
            return self._tries("write", key, put)
        except StorageError as error:
            if not sent:
                raise
            try:
                return self._tries("read", key, lambda client: _is_made_by(client, key, nonce, data))
            except StorageError:
                raise InDoubtError(
                    f"it is not known whether {self.address(key)} was written: {error.message}", hint=error.hint
                ) from error

    def put(self, key: str, data: bytes) -> None:
        """Make an object, or replace it."""
        import obstore

        self._tries("write", key, lambda client: obstore.put(client, key, data, use_multipart=False))

    def put_pieces(self, key: str, pieces: Iterator[bytes]) -> None:
        """Make a large object of pieces of ``PART_BYTES`` as they come; if they end with an error there is none.

        Raises:
            StorageError: there is an object of this name, or a piece could not be written in all its tries.
        """
        import obstore

        if self.info(key) is not None:
            raise self.exists_already(key)
        nonce, failed = secrets.token_hex(12), list[BaseException]()

        def watched() -> Iterator[bytes]:
            try:
                yield from pieces
            except BaseException as error:
                failed.append(error)
                raise

        try:
            obstore.put(
                self._connected(retrying=True), key, watched(), attributes={_NONCE: nonce}, use_multipart=True,
                chunk_size=PART_BYTES, max_concurrency=_PIECES_AT_ONCE,
            )  # fmt: skip
        except Exception as error:
            if failed:
                raise failed[0] from None
            # The last request says that the object is whole; its answer may have got lost.
            if not self._has_nonce(key, nonce):
                raise self._error("write", key, _failure(error)) from None  # its text is pages long

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; missing is no error."""
        import obstore

        gone = list(keys)
        if not gone:
            return

        def delete(client: Client) -> None:
            try:
                obstore.delete(client, gone[0] if len(gone) == 1 else gone)
            except FileNotFoundError as error:
                if _failure(error).kind == "no bucket":
                    raise

        self._tries("delete", gone[0], delete)

    def copy(self, key: str, another: str) -> bool:
        """Make an object with the content of one, or replace it; ``False`` if there is none to copy."""
        import obstore

        try:
            self._tries("copy", key, lambda client: obstore.copy(client, key, another))
        except CorruptSnapshotError:
            return False
        return True

    # -- reading

    def info(self, key: str) -> ObjectInfo | None:
        """What a server says of an object; ``None`` if there is none."""
        import obstore

        try:
            return _info(self._tries("look at", key, lambda client: obstore.head(client, key)))
        except CorruptSnapshotError:
            return None

    def get(self, key: str, bytes_max: int) -> bytes:
        """All of an object.

        Raises:
            CorruptSnapshotError: it is missing, or larger than ``bytes_max``.
        """
        import obstore

        def get(client: Client) -> bytes | int:
            found = obstore.get(client, key)
            size = found.meta["size"]
            return bytes(found.bytes()) if size <= PART_BYTES else size

        body = self._tries("read", key, get)
        if isinstance(body, bytes):
            return body
        if body > bytes_max:
            raise CorruptSnapshotError(f"{self.address(key)} is too large: {body} bytes, where few belong")
        return bytes(self.get_range(key, 0, body))

    def get_range(self, key: str, offset: int, length: int) -> bytes | memoryview:
        """Bytes of an object; fewer if it ends before, none if it ends before ``offset``.

        Raises:
            CorruptSnapshotError: it is missing.
        """
        if length <= PART_BYTES:
            return self._piece(key, offset, length)
        found = self.info(key)
        if found is None:
            raise CorruptSnapshotError(f"{self.address(key)} is missing")
        length = max(0, min(length, found.size - offset))  # the library cannot bear ranges beyond the end
        data, done = memoryview(cast(Any, pa).allocate_buffer(length)).cast("B"), 0
        while done < length:
            for piece in self._pieces(key, offset + done, min(offset + length, offset + done + _AT_ONCE_BYTES)):
                data[done : done + len(piece)] = piece
                done += len(piece)
        return data

    def _pieces(self, key: str, start: int, end: int) -> list[bytes]:
        """Several at once."""
        import obstore

        starts = list(range(start, end, PART_BYTES))
        ends = [min(one + PART_BYTES, end) for one in starts]

        def get(client: Client) -> list[bytes]:
            return cast("list[bytes]", obstore.get_ranges(client, key, starts=starts, ends=ends, coalesce=0))

        return self._tries("read", key, get)

    def _piece(self, key: str, offset: int, length: int) -> bytes:
        import obstore

        if length == 0:
            return b""

        def get(client: Client) -> bytes:
            try:
                return bytes(obstore.get_range(client, key, start=offset, length=length))
            except Exception as error:
                if not _beyond_the_end(error):
                    raise
                return b""

        return self._tries("read", key, get)

    def get_version(self, key: str, tag: str, offset: int, length: int) -> bytes | None:
        """Bytes of the object that has this tag; ``None`` if another one has the name now.

        Raises:
            CorruptSnapshotError: there is none of the name.
        """
        import obstore
        from obstore.exceptions import PreconditionError

        def get(client: Client, start: int, end: int) -> bytes | None:
            try:
                found = obstore.get(client, key, options={"range": (start, end), "if_match": tag or None})
                return bytes(found.bytes())
            except PreconditionError:
                return None

        pieces: list[bytes] = []
        for start in range(offset, offset + length, PART_BYTES):
            end = min(start + PART_BYTES, offset + length)
            piece = self._tries("read", key, lambda client, start=start, end=end: get(client, start, end))
            if piece is None:
                return None
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def objects(self, prefix: str, *, after: str = "") -> list[ObjectInfo]:
        """All objects below a folder (no slash at its end), by key."""
        import obstore

        def collect(client: Client) -> list[ObjectInfo]:
            found = obstore.list(client, prefix or None, offset=after or None, chunk_size=1000)
            return [_info(meta) for chunk in found for meta in chunk]

        return sorted(self._listed(prefix, collect))

    def any_below(self, prefix: str) -> bool:
        """True if there is an object below a folder."""
        import obstore

        def first(client: Client) -> list[bool]:
            return [True for _ in next(iter(obstore.list(client, prefix or None, chunk_size=1)), [])]

        return bool(self._listed(prefix, first))

    def names(self, prefix: str) -> list[str]:
        """Names directly in a folder, of objects and of folders with objects in them.

        Some servers tell a folder as an object in itself, and for a while folders of which all objects are gone.
        """
        import obstore

        start = len(prefix)

        def collect(client: Client) -> list[str]:
            found = obstore.list_with_delimiter(client, prefix or None)
            keys = [*found["common_prefixes"], *(meta["path"] for meta in found["objects"])]
            return sorted({name for key in keys if (name := key[start:].strip("/"))})

        return self._listed(prefix, collect)

    def _listed(self, prefix: str, collect: Callable[[Client], list[_T]]) -> list[_T]:
        def tried(client: Client) -> list[_T]:
            try:
                return collect(client)
            except FileNotFoundError as error:
                if _failure(error).kind == "no bucket":
                    raise
                return []

        return self._tries("list", prefix, tried)

    # -- inside

    def exists_already(self, key: str) -> StorageError:
        """The error of who would write something twice."""
        return StorageError(f"{self.address(key)} exists already: no path is ever written twice")

    def _has_nonce(self, key: str, nonce: str) -> bool:
        import obstore

        try:
            return self._tries("read", key, lambda client: obstore.get(client, key).attributes.get(_NONCE)) == nonce
        except StorageError:
            return False

    def _tries(self, what: str, key: str, call: Callable[[Client], _T]) -> _T:
        """A call, again as long as the server may answer another time otherwise."""
        pause_s, ends_s, renewed = self._patience.pause_s, time.monotonic() + self._patience.total_s, False
        while True:
            try:
                return call(self._client)
            except (StorageError, ConfigError):
                raise
            except Exception as error:
                failure = _failure(error)
                again = failure.kind in ("unknown", "not sent")
                if failure.kind in ("denied", "expired") and not renewed:
                    # What was read of a file, or got from the instance, may have been followed by another one.
                    renewed = again = True
                    self._client = self._connected()
                if not again or time.monotonic() + pause_s >= ends_s:
                    raise self._error(what, key, failure) from None  # its text is pages long
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, self._patience.longest_pause_s)

    def _error(self, what: str, key: str, failure: _Failure) -> StorageError:
        where = self.address(key)
        if failure.kind == "missing":
            return CorruptSnapshotError(f"{where} is missing")
        told = f"cannot {what} {where}: {failure.text}"
        if failure.kind == "no bucket":
            return StorageError(
                f"cannot {what} {where}: bucket {self.name!r} is not there",
                hint="Make it, or correct the name; look at AWS_REGION and AWS_ENDPOINT_URL, too.",
            )
        if failure.kind == "expired":
            return StorageError(
                told,
                hint="The credentials have expired: see that what AWS_SHARED_CREDENTIALS_FILE names is renewed in "
                "time, or let the machine's role give them.",
            )
        if failure.kind == "denied":
            return StorageError(
                told,
                hint=f"Driver and workers need the right to get, put, delete and list in bucket {self.name!r}; "
                "look at the credentials in their environment.",
            )
        if failure.kind == "unsafe":
            return StorageError(
                f"cannot {what} {where}: the endpoint is http://, and only https:// is allowed",
                hint=f"Set {_PREFIX[self.scheme]}_ALLOW_HTTP=true if what is sent may be read on the way.",
            )
        if failure.kind == "refused":
            return StorageError(
                told, hint="If the bucket is full, or has a quota, make room; completed checkpoints are untouched."
            )
        return StorageError(
            told, hint="Is the endpoint right (AWS_ENDPOINT_URL), and reachable from driver and workers?"
        )

    def _connected(self, *, retrying: bool = False) -> Client:
        """A client.  With ``retrying`` it repeats requests itself, of which none does harm if it is done twice."""
        try:
            from obstore import store as stores
            from obstore.exceptions import BaseError
        except ImportError as error:
            raise ConfigError(
                f"{self.scheme}://{self.name} needs obstore, which is not here",
                hint="Install it in the driver and where the workers run: pip install 'cutwater[s3]'.",
            ) from error
        patience = self._patience
        backoff = {
            "init_backoff": timedelta(seconds=patience.pause_s),
            "max_backoff": timedelta(seconds=patience.longest_pause_s),
        }
        options: dict[str, Any] = {
            "client_options": {
                "timeout": timedelta(seconds=patience.request_s),
                "connect_timeout": timedelta(seconds=patience.connect_s),
                # Options that are given replace those of the environment.
                "allow_http": os.environ.get(f"{_PREFIX[self.scheme]}_ALLOW_HTTP", "").lower() in ("1", "true"),
            },
            "retry_config": {
                "max_retries": 10 if retrying else 0,
                "retry_timeout": timedelta(seconds=patience.total_s),
                "backoff": backoff,
            },
        }
        try:
            if self.scheme == "gs":
                return stores.GCSStore(self.name, **options)
            if self.scheme == "az":
                return stores.AzureStore(self.name, **options)
            provider = credentials_file(os.environ)
            if provider is not None:
                options["credential_provider"] = provider
            return stores.S3Store(self.name, **options)
        except (BaseError, ValueError) as error:
            raise ConfigError(
                f"{self.scheme}://{self.name} cannot be used: {_first_line(str(error))}",
                hint="Look at the variables AWS_... of this process's environment.",
            ) from None


def _is_made_by(client: Client, key: str, nonce: str, data: bytes | memoryview) -> bool:
    """Whether an object that is there comes from this call; by its content where a server drops metadata."""
    import obstore

    found = obstore.get(client, key)
    made_by = found.attributes.get(_NONCE)
    return made_by == nonce if made_by is not None else bytes(found.bytes()) == bytes(data)


def _info(meta: Any) -> ObjectInfo:
    modified = meta["last_modified"]
    return ObjectInfo(meta["path"], meta["size"], meta["e_tag"] or "", int(modified.timestamp() * 1_000_000) * 1_000)


def _failure(error: Exception) -> _Failure:
    """What an error of the library means, by its type and what it quotes of the server's answer."""
    from obstore import exceptions as known

    text = str(error)
    code, message, found = _CODE.search(text), _MESSAGE.search(text), _STATUS.search(text)
    status = int(found[1]) if found is not None else 0
    told = " ".join(part[1] for part in (code, message) if part is not None) or _first_line(text)
    if status and code is not None:
        told = f"{status} {told}"
    name = code[1] if code is not None else ""
    if name == "NoSuchBucket" or (isinstance(error, FileNotFoundError) and "NoSuchBucket" in text):
        return _Failure("no bucket", told)
    if isinstance(error, FileNotFoundError):
        return _Failure("missing", told)
    if name in _EXPIRED:
        return _Failure("expired", told)
    if isinstance(error, known.PermissionDeniedError | known.UnauthenticatedError) or status in (401, 403):
        return _Failure("denied", told)
    if "builder error" in text:
        return _Failure("unsafe", told)
    if "client error (Connect)" in text or "tcp connect error" in text:
        return _Failure("not sent", told)
    if 400 <= status < 500 and status not in _NOT_NOW:
        return _Failure("refused", told)
    if status in (501, 507) or name == "XMinioStorageFull":
        return _Failure("refused", told)
    return _Failure("unknown", told, status)


def _beyond_the_end(error: Exception) -> bool:
    text = str(error)
    return "InvalidRange" in text or "416" in text or "out of range" in text or "Requested range" in text


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]
