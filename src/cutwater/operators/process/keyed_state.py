"""What every state of a process function is: something checked, kept by key, perhaps for a while only."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from cutwater.errors import UserCodeError
from cutwater.operators.process.state_types import as_type, checked, value_check
from cutwater.state.backend import StateBackend
from cutwater.state.objects.table import FrozenObjects, KeyedObjects, ObjectTable
from cutwater.state.objects.ttl import Expiries, Stamped, TimeToLive, TtlUpdate, stamped, stamped_type

VALUE = "__value"
"""Column of a state's segments that holds the content of a key."""


class Cursor:
    """What the states of one subtask are about at the moment: the key, and the processing time."""

    __slots__ = ("key", "now_ms")

    def __init__(self, now_ms: Callable[[], int] = lambda: 0) -> None:
        self.key: Hashable = None
        self.now_ms = now_ms

    @contextlib.contextmanager
    def kept(self) -> Generator[None]:
        """Afterwards the key is again what it was."""
        key = self.key
        try:
            yield
        finally:
            self.key = key


class KeyedState:
    """A state of a process function: one thing for each key.  Declared in the class, used through ``self``.

    Args:
        types: Spark's names of the types of what it holds.
        ttl: how long a value is kept, such as "1h" (processing time); for ever if not given.
        ttl_update: "on_write": from its last writing on; "on_read_and_write": reading keeps it, too.

    Raises:
        BuildError: no such type, or a ``ttl`` that is none.
    """

    kind: ClassVar[str]
    _container: ClassVar[type[Any] | None] = None
    """Type of a content that is changed in place, which makes copies."""

    def __init__(self, *types: str | pa.DataType, ttl: Any = None, ttl_update: TtlUpdate = "on_write") -> None:
        self.types = tuple(as_type(t) for t in types)
        self.name = ""
        self._checks = [value_check(t) for t in self.types]
        self._ttl = None if ttl is None else TimeToLive(ttl, ttl_update)
        self._clear_all()

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def _clear_all(self) -> None:
        self._cursor = Cursor()
        self._table: KeyedObjects[Any] = ObjectTable(self._container)
        self._expiries = None if self._ttl is None else Expiries(self._ttl.ms)

    @property
    def stored_type(self) -> pa.DataType:
        """The Arrow type of one key's content in a snapshot."""
        return self._element_type(0)

    def fresh(self) -> KeyedState:
        """An empty state of the same declaration, for one subtask."""
        state = copy.copy(self)
        state._clear_all()
        return state

    def attach(self, cursor: Cursor) -> None:
        """Let key and time be those of a cursor, which all states of a subtask share."""
        self._cursor = cursor

    def open(self, backend: StateBackend, key_types: Sequence[pa.DataType]) -> None:
        """Keep what comes where a backend says; the state is empty."""
        self._table = backend.objects(key_types, self.stored_type, self.stored, self._revive, self._container)

    def bind(self, key: Hashable) -> None:
        """The key that the next calls are about."""
        self._cursor.key = key

    def clear(self) -> None:
        """Forget what is kept of this key."""
        self._table.remove(self._cursor.key)

    def track(self, *, restored: bool = False) -> None:
        """See ``KeyedObjects``."""
        self._table.track(restored=restored)

    def freeze(self, checkpoint_id: int | None = None) -> FrozenObjects[Any]:
        """All keys, as they are now; see ``KeyedObjects``."""
        return self._table.freeze(checkpoint_id)

    def fetch(self, keys: Sequence[Hashable]) -> None:
        """These keys come next."""
        self._table.get_many(keys)

    @property
    def objects(self) -> KeyedObjects[Any]:
        """The contents by key."""
        return self._table

    def restore(self, key: Hashable, stored: Any) -> None:
        """Set a key to what a snapshot held of it."""
        value = self._revive(stored)
        self._table.put(key, value)
        if self._expiries is not None:
            self._expiries.watch(key, self._first_expiry(value))

    def stored(self, value: Any) -> Any:
        """One key's content as Arrow takes it."""
        return value

    # ------------------------------------------------------------------------------------------------ time to live

    @property
    def expires(self) -> bool:
        """Whether it has a time to live."""
        return self._ttl is not None

    @property
    def next_cleanup_ms(self) -> int | None:
        """When ``clean_up`` is wanted; ``None`` if nothing kept can expire."""
        return None if self._expiries is None else self._expiries.next_ms

    def clean_up(self, now_ms: int, most: int) -> None:
        """Drop what has expired, of up to ``most`` keys."""
        expiries = self._expiries
        while most > 0 and expiries is not None and (key := expiries.due(now_ms)) is not None:
            most -= 1
            kept = self._table.get(key)
            if kept is None:
                continue
            if self._first_expiry(kept) <= now_ms:
                kept = self._unexpired(kept, now_ms)
                if not kept:
                    self._table.remove(key)
                    continue
                self._table.put(key, kept)
            expiries.watch(key, self._first_expiry(kept))

    def _first_expiry(self, value: Any) -> int:
        """When the first part of a key's content expires."""
        return value[1]

    def _unexpired(self, value: Any, now_ms: int) -> Any:
        """What is left of a key's content; something empty if nothing is."""
        return value if value[1] > now_ms else ()

    def _stamp(self, value: Any) -> Any:
        """A value as it is kept: with its expiry, if it has one."""
        if self._ttl is None or self._expiries is None:
            return value
        expires_ms = self._cursor.now_ms() + self._ttl.ms
        self._expiries.watch(self._cursor.key, expires_ms)
        return value, expires_ms

    def _alive(self, stamped: Stamped) -> bool:
        return stamped[1] > self._cursor.now_ms()

    # ------------------------------------------------------------------------------------------------------ values

    def _revive(self, value: Any) -> Any:
        """The content of a key, from what Arrow gave."""
        return value if self._ttl is None else stamped(value)

    def _element_type(self, position: int) -> pa.DataType:
        kind = self.types[position]
        return kind if self._ttl is None else stamped_type(kind)

    def _checked_many(self, values: Any) -> list[Any]:
        """Many values as the type holds them: numbers in arrays at once, all else one by one."""
        kind = self.types[0]
        if isinstance(values, np.ndarray):
            values = pa.array(values)
        if isinstance(values, pa.Array | pa.ChunkedArray):
            if values.type == kind:
                return values.to_pylist()
            if _is_number(kind) and _is_number(values.type):
                try:
                    return values.cast(kind).to_pylist()
                except pa.ArrowException as error:
                    raise UserCodeError(
                        f"state {self.name!r} of type {kind} cannot hold the values: {error}",
                        hint="Convert the values, or declare the state with their type.",
                    ) from None
            values = values.to_pylist()
        return [None if value is None else self._checked(value) for value in values]

    def _checked(self, value: Any, check: int = 0) -> Any:
        return checked(value, self._checks[check], self.name, self.types[check])


def _is_number(kind: pa.DataType) -> bool:
    return pt.is_integer(kind) or pt.is_float32(kind) or pt.is_float64(kind)
