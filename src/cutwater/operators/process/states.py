"""The states of process functions: declared as class attributes, bound to the current key while a row is processed.

Values are checked against the declared type when they are set.  A state with a time to live keeps each value (of a list
or map: each element) together with the processing time at which it expires.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from cutwater.data.rows import shorten_value
from cutwater.errors import BuildError, UserCodeError
from cutwater.operators.process.state_types import MISFITS, DeclaredState, integer_range, short_range
from cutwater.state.objects.memory_records import MemoryRecords
from cutwater.state.objects.records import Records
from cutwater.state.objects.table import KeyedObjects, ObjectLayout
from cutwater.state.objects.ttl import Expiries, Stamped, TimeToLive, TtlUpdate, stamped, stamped_type, unstamped

_OF_A_SUBTASK = frozenset({"_records", "_column", "_table", "_now_ms", "_expiries"})
"""Attributes of a state that hold what is kept of keys."""
VALUE = "__value"
"""Column of a state's segments that holds the content of a key."""


class KeyedState(DeclaredState):
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
        super().__init__(*types)
        self._ttl = None if ttl is None else TimeToLive(ttl, ttl_update)
        self._empty()

    def __getstate__(self) -> dict[str, Any]:
        """The declaration, which goes to the workers with the program."""
        return {name: value for name, value in self.__dict__.items() if name not in _OF_A_SUBTASK}

    def __setstate__(self, declaration: dict[str, Any]) -> None:
        for name, value in declaration.items():  # not through ``vars``: Python finds attributes sooner without a dict
            setattr(self, name, value)
        self._empty()

    def _empty(self) -> None:
        self._expiries = None if self._ttl is None else Expiries(self._ttl.ms)
        self.open(MemoryRecords([self._container], single=False), 0, lambda: 0)

    @property
    def stored_type(self) -> pa.DataType:
        """The Arrow type of one key's content in a snapshot."""
        return self._element_type(0)

    @property
    def layout(self) -> ObjectLayout:
        """What it keeps of each key."""
        return ObjectLayout(self.stored_type, self.stored, self._revive, self._container)

    def open(self, records: Records, place: int, now_ms: Callable[[], int]) -> None:
        """Keep what comes in records, in which it has a place, and be about their current key; the state is empty.

        Args:
            now_ms: the processing time.
        """
        self._records, self._now_ms = records, now_ms
        self._column = records.columns[place]
        self._table: KeyedObjects[Any] = self._column.objects

    def bind(self, key: Hashable) -> None:
        """The key that the next calls are about."""
        self._records.bind(key)

    def unbind(self, key: Hashable) -> None:
        """The next calls are about no key; see ``Records.unbind``."""
        self._records.unbind(key)

    def clear(self) -> None:
        """Forget what is kept of this key."""
        self._column.vacate(self._column.record, self._records.key)

    @property
    def objects(self) -> KeyedObjects[Any]:
        """The contents by key."""
        return self._table

    def restore(self, keys: Sequence[Hashable], stored: Iterable[Any]) -> None:
        """Set bare keys to what a snapshot held of them."""
        values = list(map(self._revive, stored))
        self._column.fill(keys, values)
        if self._expiries is not None:
            for key, value in zip(keys, values, strict=True):
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
        with self._records.kept():
            while most > 0 and expiries is not None and (key := expiries.due(now_ms)) is not None:
                most -= 1
                self._records.bind(key)
                kept = self._column.record.held
                if kept is None:
                    continue
                if self._first_expiry(kept) <= now_ms:
                    kept = self._unexpired(kept, now_ms)
                    if not kept:
                        self.clear()
                        continue
                    self._keep(kept)
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
        expires_ms = self._now_ms() + self._ttl.ms
        self._expiries.watch(self._records.key, expires_ms)
        return value, expires_ms

    def _alive(self, stamped: Stamped) -> bool:
        return stamped[1] > self._now_ms()

    def _keep(self, content: Any) -> None:
        """Let this be what is kept of the key."""
        column = self._column
        record = column.record
        if record.written is not column.epoch:
            record = column.claim(record, self._records.key, content)
        record.held = content

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


def _is_number(kind: pa.DataType) -> bool:
    return pt.is_integer(kind) or pt.is_float32(kind) or pt.is_float64(kind)


class ValueState(KeyedState):
    """One value for each key.

    >>> best = ValueState("long")
    >>> best.bind("a"); best.value = 3; best.bind("b")
    >>> best.value is None, best.get(0)
    (True, 0)
    """

    kind = "value"

    def __init__(self, type: str | pa.DataType, *, ttl: Any = None, ttl_update: TtlUpdate = "on_write") -> None:
        super().__init__(type, ttl=ttl, ttl_update=ttl_update)
        self._low, self._high = integer_range(self.types[0])
        self._short_low, self._short_high = short_range(self.types[0])

    @property
    def value(self) -> Any:
        """The value, or ``None``.  Setting it to ``None`` clears it.  Not to be changed in place: set it anew.

        Raises:
            UserCodeError: set to something that the declared type cannot hold.
        """
        kept = self._column.record.held
        if self._ttl is None or kept is None:
            return kept
        if not self._alive(kept):
            return None
        if self._ttl.on_read:
            self._keep(self._stamp(kept[0]))
        return kept[0]

    @value.setter
    def value(self, value: Any) -> None:
        kept = value
        if value.__class__ is int and (
            self._short_low <= value <= self._short_high or self._low <= value <= self._high
        ):
            pass  # what most states hold, without a call
        elif value is None:
            self.clear()
            return
        else:
            try:
                kept = self._checks[0](value)
            except MISFITS:
                raise self._misfit(value) from None
        if self._ttl is not None:
            kept = self._stamp(kept)
        column = self._column  # as ``_keep``, without a call: this is what most functions do with most rows
        record = column.record
        if record.written is not column.epoch:
            record = column.claim(record, self._records.key, kept)
        record.held = kept

    def get(self, default: Any = None) -> Any:
        """The value, or ``default``."""
        value = self._column.record.held if self._ttl is None else self.value
        return default if value is None else value

    def get_many(self, keys: Sequence[Hashable], default: Any = None) -> list[Any]:
        """The values of many keys (those of ``ctx.group(batch)``), ``default`` for a key without."""
        if self._ttl is None:
            return [default if value is None else value for value in self._table.get_many(keys)]
        found: list[Any] = []
        with self._records.kept():
            for key in self._records.bare(keys):
                self._records.bind(key)
                found.append(self.get(default))
        return found

    def put_many(self, keys: Sequence[Hashable], values: Any) -> None:
        """Set many keys at once; a null clears its key.

        Args:
            keys: as many as values, each once.
            values: a list, a NumPy array or an Arrow array.

        Raises:
            UserCodeError: there are not as many, or the declared type cannot hold one of them.
        """
        checked = self._checked_many(values)
        if len(checked) != len(keys):
            raise UserCodeError(f"state {self.name!r}: {len(checked)} values for {len(keys)} keys")
        with self._records.kept():
            if self._ttl is None and None not in checked:
                self._table.put_many(keys, checked)
                return
            for key, value in zip(self._records.bare(keys), checked, strict=True):
                self._records.bind(key)
                if value is None:
                    self.clear()
                else:
                    self._keep(self._stamp(value))

    def stored(self, value: Any) -> Any:
        return value if self._ttl is None else unstamped(value)


class ReducingState(ValueState):
    """One value for each key, into which others are reduced.

    Args:
        type: of the values, and of what ``reduce`` makes of two.
        reduce: of the value so far and the next one.

    >>> most = ReducingState("long", max)
    >>> most.bind("a"); most.add(3); most.add(2)
    >>> most.value
    3
    """

    kind = "reducing"

    def __init__(
        self,
        type: str | pa.DataType,
        reduce: Callable[[Any, Any], Any],
        *,
        ttl: Any = None,
        ttl_update: TtlUpdate = "on_write",
    ) -> None:
        if not callable(reduce):
            raise BuildError(
                f"{shorten_value(reduce)} does not reduce", hint="Write for example cw.ReducingState('long', max)."
            )
        self._reduce = reduce
        super().__init__(type, ttl=ttl, ttl_update=ttl_update)

    def add(self, value: Any) -> None:
        """Reduce one more value into what is kept.

        Raises:
            UserCodeError: the declared type cannot hold it, or what came out.
        """
        checked = self._checked(value)
        before = self.value
        self._keep(self._stamp(checked if before is None else self._checked(self._reduce(before, checked))))


class ListState(KeyedState):
    """A list for each key.  With a time to live each element expires on its own.

    >>> seen = ListState("string")
    >>> seen.bind("a"); seen.append("x"); seen.extend(["y", "z"])
    >>> list(seen), len(seen), seen[0]
    (['x', 'y', 'z'], 3, 'x')
    """

    kind = "list"
    _container = list

    def __init__(self, type: str | pa.DataType, *, ttl: Any = None, ttl_update: TtlUpdate = "on_write") -> None:
        super().__init__(type, ttl=ttl, ttl_update=ttl_update)
        self._short_low, self._short_high = short_range(self.types[0])

    @property
    def stored_type(self) -> pa.DataType:
        return pa.list_(self._element_type(0))

    def append(self, value: Any) -> None:
        """Add to the end.

        Raises:
            UserCodeError: the declared type cannot hold it.
        """
        kept = value
        if value.__class__ is not int or not self._short_low <= value <= self._short_high:
            try:
                kept = self._checks[0](value)
            except MISFITS:
                raise self._misfit(value) from None
        if self._ttl is not None:
            kept = self._stamp(kept)
        column = self._column
        record = column.record
        values = record.held if record.written is column.epoch else column.owned(record, self._records.key)
        if values is None:
            self._keep([kept])
        else:
            values.append(kept)

    def extend(self, values: Iterable[Any]) -> None:
        """Add all of them to the end."""
        for value in values:
            self.append(value)

    def set(self, values: Iterable[Any]) -> None:
        """Exactly these values; none clears the list."""
        kept = [self._stamp(self._checked(value)) for value in values]
        if kept:
            self._keep(kept)
        else:
            self.clear()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values())

    def __len__(self) -> int:
        kept = self._column.record.held or ()
        return len(kept) if self._ttl is None else len(self._unexpired(kept, self._now_ms()))

    def __getitem__(self, index: int) -> Any:
        return self._values()[index]

    def stored(self, value: Any) -> Any:
        return value if self._ttl is None else [unstamped(v) for v in value]

    def _values(self) -> tuple[Any, ...]:
        kept = self._column.record.held or ()
        if self._ttl is None or not kept:
            return tuple(kept)
        values = tuple(value for value, _ in self._unexpired(kept, self._now_ms()))
        if self._ttl.on_read and values:
            self._keep([self._stamp(value) for value in values])
        return values

    def _first_expiry(self, value: Any) -> int:
        return min((expires_ms for _, expires_ms in value), default=0)

    def _unexpired(self, value: Any, now_ms: int) -> Any:
        return [stamped for stamped in value if stamped[1] > now_ms]

    def _revive(self, value: Any) -> Any:
        return value if self._ttl is None else [stamped(v) for v in value]


class MapState(KeyedState, MutableMapping[Any, Any]):
    """A dict for each key, in the order of insertion.  With a time to live each entry expires on its own.

    >>> routes = MapState("string", "int")
    >>> routes.bind("a"); routes["JFK"] = 2; routes["LGA"] = 1; del routes["JFK"]
    >>> dict(routes), routes.get("EWR"), "LGA" in routes
    ({'LGA': 1}, None, True)
    """

    kind = "map"
    _container = dict

    def __init__(
        self,
        key_type: str | pa.DataType,
        value_type: str | pa.DataType,
        *,
        ttl: Any = None,
        ttl_update: TtlUpdate = "on_write",
    ) -> None:
        super().__init__(key_type, value_type, ttl=ttl, ttl_update=ttl_update)
        self._short_low, self._short_high = short_range(self.types[1])
        self._short_low_key, self._short_high_key = short_range(self.types[0])

    @property
    def stored_type(self) -> pa.DataType:
        return pa.map_(self.types[0], self._element_type(1))

    def __getitem__(self, key: Any) -> Any:
        kept = self._entries()[key]
        if self._ttl is None:
            return kept
        if not self._alive(kept):
            raise KeyError(key)
        if self._ttl.on_read:
            self._owned()[key] = self._stamp(kept[0])
        return kept[0]

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of a key of the map, or ``default``."""
        if self._ttl is not None:
            return super().get(key, default)
        entries = self._column.record.held
        return default if entries is None else entries.get(key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        checks, which = self._checks, 0
        try:
            if key.__class__ is not int or not self._short_low_key <= key <= self._short_high_key:
                key = checks[0](key)
            which = 1
            if value.__class__ is int and self._short_low <= value <= self._short_high:
                pass
            elif value is not None:
                value = checks[1](value)
        except MISFITS:
            raise self._misfit((key, value)[which], which) from None
        kept = value if self._ttl is None else self._stamp(value)
        column = self._column
        record = column.record
        entries = record.held if record.written is column.epoch else column.owned(record, self._records.key)
        if entries is None:
            self._keep({key: kept})
            return
        if self._ttl is not None and key in entries and not self._alive(entries[key]):
            del entries[key]  # whether it was cleaned up already must not be seen in the order
        entries[key] = kept

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        if len(self._entries()) == 1:
            self.clear()
        else:
            del self._owned()[key]

    def __contains__(self, key: object) -> bool:
        entries = self._entries()
        return key in entries and (self._ttl is None or self._alive(entries[key]))

    def __iter__(self) -> Iterator[Any]:
        return iter(tuple(self._live_entries()))

    def __len__(self) -> int:
        return len(self._live_entries())

    def stored(self, value: Any) -> Any:
        return list(value.items()) if self._ttl is None else [(k, unstamped(v)) for k, v in value.items()]

    def _revive(self, value: Any) -> Any:
        return dict(value) if self._ttl is None else {k: stamped(v) for k, v in value}

    def _entries(self) -> dict[Any, Any]:
        return self._column.record.held or {}

    def _live_entries(self) -> dict[Any, Any]:
        entries = self._entries()
        return entries if self._ttl is None else self._unexpired(entries, self._now_ms())

    def _owned(self) -> dict[Any, Any]:
        owned: dict[Any, Any] | None = self._column.owned(self._column.record, self._records.key)
        assert owned is not None
        return owned

    def _first_expiry(self, value: Any) -> int:
        return min((expires_ms for _, expires_ms in value.values()), default=0)

    def _unexpired(self, value: Any, now_ms: int) -> Any:
        return {key: stamped for key, stamped in value.items() if stamped[1] > now_ms}
