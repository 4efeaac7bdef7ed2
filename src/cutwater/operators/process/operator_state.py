"""Operator state: what a subtask keeps that belongs to no key.

How it comes back at another parallelism is what tells the kinds apart.  The elements of a list lie in the key groups of
the subtask that had them, one after the other, so that they move with the groups and every new subtask gets its share;
at the same parallelism each stays where it was.  Of a union every subtask gets all.  A broadcast state is the same
everywhere, so that one copy is enough; a subtask takes that of the subtask whose number it has (modulo what there was),
which fits the broadcast rows that an unaligned snapshot holds for it.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Generator, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from cutwater.errors import UserCodeError
from cutwater.operators.base import Context
from cutwater.operators.process.state_types import DeclaredState
from cutwater.state.segments import GROUP_COLUMN, Segment

_SUBTASK, _SUBTASKS, _POSITION, _VALUE = "__subtask", "__subtasks", "__position", "__value"


class OperatorState(DeclaredState):
    """A state of a process function that belongs to no key.  Declared in the class, used through ``self``.

    Args:
        types: Spark's names of the types of what it holds.

    Raises:
        BuildError: no such type.
    """

    kind = ""
    """For upgrade checks."""
    _everywhere = False
    """Whether every subtask is offered everything at a restore."""

    def __init__(self, *types: str | pa.DataType) -> None:
        super().__init__(*types)
        self._empty()

    @property
    def stored_type(self) -> pa.DataType:
        """The Arrow type of all that a subtask keeps, for upgrade checks."""
        return pa.list_(self._element_type)

    def freeze(self, ctx: Context) -> Iterator[Segment]:
        """What is kept now, as segments (made when they are asked for)."""
        return self._segments(self._elements(), ctx)

    def restore(self, segments: Iterable[Segment], ctx: Context) -> None:
        """Take what of the segments falls to this subtask."""
        rows: list[tuple[int, int, Any]] = []
        for segment in segments:
            batch = segment.batch
            columns = [batch.column(name).to_pylist() for name in (GROUP_COLUMN, _SUBTASK, _SUBTASKS, _POSITION)]
            values = batch.column(_VALUE).cast(self._element_type).to_pylist()
            for group, subtask, subtasks, position, value in zip(*columns, values, strict=True):
                if self._falls_to(ctx, group, subtask, subtasks):
                    rows.append((subtask, position, value))
        rows.sort(key=lambda row: row[:2])
        self._fill([value for _, _, value in rows])

    def _falls_to(self, ctx: Context, group: int, subtask: int, subtasks: int) -> bool:
        return group in ctx.key_groups

    def _segments(self, elements: Sequence[Any], ctx: Context) -> Iterator[Segment]:
        owned = ctx.key_groups
        count = len(elements)
        position = np.arange(count)
        groups = owned.start + position % len(owned)
        order = np.argsort(groups, kind="stable")
        batch = pa.RecordBatch.from_arrays(
            [
                pa.array(groups[order], pa.uint16()),
                pa.array(np.full(count, ctx.subtask), pa.int32()),
                pa.array(np.full(count, ctx.parallelism), pa.int32()),
                pa.array(position[order]),
                pa.array([elements[i] for i in order.tolist()], self._element_type),
            ],
            names=[GROUP_COLUMN, _SUBTASK, _SUBTASKS, _POSITION, _VALUE],
        )
        # This subtask's part begins anew, also where it is empty now.
        yield Segment(self.name, "base", batch.slice(0, 0), (owned.start, owned.stop))
        if not elements:
            return
        # Whoever owns one of the groups is offered the segment; each subtask adds to what the others have.
        reach = (0, ctx.max_parallelism) if self._everywhere else (owned.start, owned.stop)
        yield Segment(self.name, "delta", batch, reach)

    @property
    def _element_type(self) -> pa.DataType:
        return self.types[0]

    @abstractmethod
    def _elements(self) -> Sequence[Any]:
        """What is kept now; later changes are not in it."""

    @abstractmethod
    def _fill(self, elements: list[Any]) -> None: ...


class OperatorListState(OperatorState):
    """A list for each subtask; at another parallelism the elements are shared out evenly.

    >>> open_files = OperatorListState("string")
    >>> open_files.append("a"); open_files.extend(["b", "c"])
    >>> list(open_files), len(open_files), open_files[-1]
    (['a', 'b', 'c'], 3, 'c')
    """

    kind = "elements"

    def __init__(self, type: str | pa.DataType) -> None:
        super().__init__(type)

    def append(self, value: Any) -> None:
        """Add to the end.

        Raises:
            UserCodeError: the declared type cannot hold it.
        """
        self._values.append(self._checked(value))

    def extend(self, values: Iterable[Any]) -> None:
        """Add all of them to the end."""
        for value in values:
            self.append(value)

    def set(self, values: Iterable[Any]) -> None:
        """Exactly these values."""
        self._values = [self._checked(value) for value in values]

    def clear(self) -> None:
        """Forget all."""
        self._values = []

    def __iter__(self) -> Iterator[Any]:
        return iter(tuple(self._values))

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int) -> Any:
        return self._values[index]

    def _empty(self) -> None:
        self._values: list[Any] = []

    def _elements(self) -> Sequence[Any]:
        return tuple(self._values)

    def _fill(self, elements: list[Any]) -> None:
        self._values = elements


class UnionListState(OperatorListState):
    """A list for each subtask; after a restore every subtask has the elements of all of them.

    >>> offsets = UnionListState("struct<split: string, next: long>")
    >>> offsets.append({"split": "a", "next": 7})
    >>> list(offsets)
    [{'split': 'a', 'next': 7}]
    """

    kind = "union"
    _everywhere = True

    def _falls_to(self, ctx: Context, group: int, subtask: int, subtasks: int) -> bool:
        return True


class BroadcastState(OperatorState, MutableMapping[Any, Any]):
    """A dict that is the same in every subtask, because only broadcast rows change it; all others may read it.

    >>> rules = BroadcastState("string", "long")
    >>> rules["limit"] = 3
    Traceback (most recent call last):
    cutwater.errors.UserCodeError: broadcast state '' can be changed by broadcast rows only. Change it ...
    >>> with rules.writable():
    ...     rules["limit"] = 3
    >>> dict(rules)
    {'limit': 3}
    """

    kind = "broadcast"
    _everywhere = True

    def __init__(self, key_type: str | pa.DataType, value_type: str | pa.DataType) -> None:
        super().__init__(key_type, value_type)

    @contextlib.contextmanager
    def writable(self) -> Generator[None]:
        """While this lasts, the state can be changed."""
        self.is_writable = True
        try:
            yield
        finally:
            self.is_writable = False

    def __getitem__(self, key: Any) -> Any:
        return self._entries[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._check_writable()
        self._entries[self._checked(key, 0)] = None if value is None else self._checked(value, 1)

    def __delitem__(self, key: Any) -> None:
        self._check_writable()
        del self._entries[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(tuple(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def _check_writable(self) -> None:
        if not self.is_writable:
            raise UserCodeError(
                f"broadcast state {self.name!r} can be changed by broadcast rows only",
                hint="Change it in process_broadcast, which every subtask calls for every broadcast row.",
            )

    @property
    def _element_type(self) -> pa.DataType:
        return pa.struct([pa.field("key", self.types[0]), pa.field("value", self.types[1])])

    def _empty(self) -> None:
        self._entries: dict[Any, Any] = {}
        self.is_writable = False

    def _elements(self) -> Sequence[Any]:
        return [{"key": key, "value": value} for key, value in self._entries.items()]

    def _fill(self, elements: list[Any]) -> None:
        self._entries = {element["key"]: element["value"] for element in elements}

    def _falls_to(self, ctx: Context, group: int, subtask: int, subtasks: int) -> bool:
        return subtask == ctx.subtask % subtasks
