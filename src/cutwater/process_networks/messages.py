"""Values as bytes: messages on channels, states and parts of snapshots."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias, get_args, get_origin, get_type_hints

import msgspec

from cutwater.errors import BuildError, DataError, UserCodeError
from cutwater.runtime.control.messages import Message


class Marker(NamedTuple):
    """A marker in a channel: the sender has recorded itself for ``snapshot``, after ``position`` messages here."""

    snapshot: int
    position: int


Item: TypeAlias = Message | Marker


class Codec:
    """Encodes the declared types of messages.

    Args:
        types: each is told apart by the name of its class, so two of them cannot share one.

    Raises:
        BuildError: two types have one name, or msgspec cannot decode one.

    >>> codec = Codec([int, str])
    >>> codec.encode(7)
    ('int', b'\\x07')
    >>> codec.decode("int", b"\\x07")
    7
    """

    def __init__(self, types: Sequence[Any]) -> None:
        self.types = tuple(types)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {}
        self._names: dict[type, str] = {}
        for kind in types:
            origin: Any = get_origin(kind) or kind
            name = getattr(origin, "__name__", "")
            if not isinstance(origin, type) or name in self._decoders:
                raise BuildError(
                    f"message type {kind!r} is no class, or has the name of another one",
                    hint="Give a list of classes with different names: messages=[Transfer, Query].",
                )
            resolve_hints(origin)
            try:
                self._decoders[name] = msgspec.msgpack.Decoder(kind)
            except TypeError as e:
                raise BuildError(f"message type {name!r} cannot be encoded: {e}") from e
            self._names[origin] = name

    def encode(self, value: Any) -> tuple[str, bytes]:
        """Name of the type, and the bytes.

        Raises:
            UserCodeError: the type was not declared, or the value cannot be encoded.
        """
        name = self._names.get(type(value))
        if name is None:
            declared = ", ".join(self._decoders) or "none"
            raise UserCodeError(
                f"a message of type {type(value).__name__!r} was sent; declared are: {declared}",
                hint="Name it in Network(..., messages=[...]).",
            )
        try:
            return name, self._encoder.encode(value)
        except (TypeError, ValueError, OverflowError) as e:
            raise UserCodeError(f"a message of type {name!r} cannot be encoded: {e}") from e

    def decode(self, kind: str, body: bytes) -> Any:
        """The message.

        Raises:
            DataError: the type is not declared, or the bytes are not of it.
        """
        decoder = self._decoders.get(kind)
        if decoder is None:
            raise DataError(
                f"a message of type {kind!r} is not declared in this network",
                hint="The snapshot or the sender has another version of the program.",
            )
        try:
            return decoder.decode(body)
        except msgspec.MsgspecError as e:
            raise DataError(f"a message of type {kind!r} cannot be decoded: {e}") from e


def encode_state(process: str, state: Any) -> bytes:
    """msgpack of a process's fields.

    Raises:
        UserCodeError: a field holds something that cannot be encoded.
    """
    try:
        return msgspec.msgpack.encode(state)
    except (TypeError, ValueError, OverflowError) as e:
        raise UserCodeError(
            f"the state of process {process!r} ({type(state).__name__}) cannot be encoded: {e}",
            hint="Fields hold numbers, texts, bytes, lists, dictionaries and dataclasses of them.",
        ) from e


def decode_state(process: str, data: bytes, kind: type) -> Any:
    """A process from its bytes.

    Raises:
        DataError: the class has fields that the snapshot does not fit.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as e:
        raise DataError(
            f"process {process!r}: its state in the snapshot does not fit class {kind.__name__}: {e}",
            hint="New fields need a default; a field whose type changed needs another name.",
        ) from e


def resolve_hints(kind: Any) -> None:
    """Turn annotations that are texts into types, here, where the names in them mean something.

    A class of a script travels to the workers by value; its module does not, and a text could not be resolved there.
    """
    for found in _dataclasses(kind):
        hints = _hints(found)
        for cls in found.__mro__:
            own: dict[str, Any] = inspect.get_annotations(cls)
            for name in own:
                cls.__annotations__[name] = hints.get(name, own[name])


def drop_caches(kind: Any) -> None:
    """Remove what msgspec keeps in classes: it cannot be sent with a class that travels by value."""
    for found in _dataclasses(kind):
        if "__msgspec_cache__" in vars(found):
            del found.__msgspec_cache__


def _dataclasses(kind: Any) -> list[Any]:
    """The dataclasses that a type is made of."""
    found: dict[Any, None] = {}
    waiting = [kind]
    while waiting:
        kind = waiting.pop()
        if isinstance(kind, type) and is_dataclass(kind):
            if kind not in found:
                found[kind] = None
                waiting += _hints(kind).values()
        else:
            waiting += get_args(kind)
    return list(found)


def _hints(kind: Any) -> dict[str, Any]:
    try:
        return get_type_hints(kind, localns=_names_around(kind), include_extras=True)
    except Exception as e:
        raise BuildError(f"the annotations of {kind} cannot be resolved: {e}") from e


def _names_around(kind: Any) -> dict[str, Any]:
    """Names that the methods of a class can see: more than its module's, where a program runs in ``exec``."""
    found: dict[str, Any] = {}
    for member in vars(kind).values():
        if isinstance(member, FunctionType):
            found.update(member.__globals__)
    return found


def check_state(process: str, state: Any) -> None:
    """A process's state survives being encoded and decoded.

    Raises:
        BuildError: it does not; the message names the process and the field.
    """
    resolve_hints(type(state))
    try:
        again = decode_state(process, encode_state(process, state), type(state))
    except (UserCodeError, DataError, TypeError) as e:
        raise BuildError(f"process {process!r} cannot be put into a snapshot: {e}") from e
    if again != state:
        raise BuildError(
            f"process {process!r} comes back from a snapshot as {again!r}, it was {state!r}",
            hint="Declare the fields with the types that their values have.",
        )


def names_of(items: Iterable[str], limit: int = 8) -> str:
    """``'a', 'b' and 3 more``.

    >>> names_of(["a", "b", "c"], limit=2)
    "'a', 'b' and 1 more"
    """
    found = list(items)
    text = ", ".join(map(repr, found[:limit]))
    return text if len(found) <= limit else f"{text} and {len(found) - limit} more"
