"""Conditions on rows, and whether rows of which only the bounds of their columns are known may fulfil them.

A condition is a Polars expression.  What can be said by bounds is found once, from the tree of the expression:
comparisons of a column with a constant, ``is_in``, ``is_between``, ``is_null``, ``is_not_null``, and what ``&`` and
``|`` make of them.  About all else nothing is said, and every row may fulfil it.  Polars itself compares the bounds
with the constants, so that types, zones and units mean the same here as where the rows are filtered.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

if TYPE_CHECKING:
    import polars as pl

Bools = npt.NDArray[np.bool_]

_MIRRORED = {"Gt": "Lt", "GtEq": "LtEq", "Lt": "Gt", "LtEq": "GtEq", "Eq": "Eq"}
_OPPOSITE = {"Gt": "LtEq", "GtEq": "Lt", "Lt": "GtEq", "LtEq": "Gt"}
_MAX_VALUES = 64
"""Of so many values of ``is_in`` each is looked for, of more only the smallest and the largest."""


@dataclass(frozen=True, eq=False)
class RowFilter:
    """A condition: rows for which it is not true are of no use."""

    expr: pl.Expr
    columns: Mapping[str, str]
    """The column of the rows for each name in the expression."""


class Bounds(NamedTuple):
    """What is known of one column in several pieces of a table."""

    low: pa.Array
    """No value of a piece, NaN aside, is smaller; null: not known."""
    high: pa.Array
    """No value of a piece, NaN aside, is larger; null: not known."""
    nulls: Sequence[int | None]
    """How many values are null; ``None``: not known."""


class Pieces(NamedTuple):
    """Pieces of a table."""

    rows: Sequence[int]
    bounds: Mapping[str, Bounds]
    """Of columns; of others nothing is known."""


class BoundsTest:
    """What a filter says about bounds.

    >>> import polars as pl
    >>> test = BoundsTest(RowFilter((pl.col("n") > 5) & pl.col("n").is_in([1, 8]), {"n": "n"}))
    >>> bounds = Bounds(pa.array([0, 0, 9, None]), pa.array([4, 8, 12, None]), [0, 0, 0, None])
    >>> test.may_hold(Pieces([10, 10, 10, 10], {"n": bounds})).tolist()
    [False, True, False, True]
    """

    def __init__(self, row_filter: RowFilter) -> None:
        self.filter = row_filter
        expr = row_filter.expr
        try:
            tree = json.loads(expr.meta.serialize(format="json"))
        except Exception:  # functions of users have no such form
            tree = None
        self._all = _All()
        if tree is not None:
            _add(self._all, tree, expr)

    @property
    def tells(self) -> bool:
        """False if every row may fulfil it, whatever the bounds."""
        return bool(self._all.atoms or self._all.choices)

    @property
    def columns(self) -> frozenset[str]:
        """Columns of the rows whose bounds are asked for."""
        return frozenset(self.filter.columns[name] for name in self._all.names() if name in self.filter.columns)

    def may_hold(self, pieces: Pieces) -> Bools:
        """For each piece, whether some row may fulfil the filter."""
        known = pieces.bounds
        domains = {
            name: _Domain.of(name, known[column], pieces.rows)
            for name, column in self.filter.columns.items()
            if column in known
        }
        return self._all.may_hold(domains, len(pieces.rows))


@dataclass
class _Domain:
    """The values that one column may have in each piece: an interval, null and NaN."""

    low: pl.DataFrame
    high: pl.DataFrame
    has_values: Bools
    has_nulls: Bools
    null: pl.DataFrame
    nan: pl.DataFrame | None
    """NaN does not count in bounds, and may always be there."""

    @classmethod
    def of(cls, name: str, bounds: Bounds, rows: Sequence[int]) -> _Domain:
        import polars as pl

        type = bounds.low.type
        frames = [pl.DataFrame([pl.Series(name, values)]) for values in (bounds.low, bounds.high, pa.nulls(1, type))]
        low, high, null = frames
        nan = pl.DataFrame([pl.Series(name, pa.array([np.nan], type))]) if pt.is_floating(type) else None
        nulls = bounds.nulls
        has_values = np.array([n is None or n < r for n, r in zip(nulls, rows, strict=True)], dtype=np.bool_)
        has_nulls = np.array([n is None or n > 0 for n in nulls], dtype=np.bool_)
        return cls(low, high, has_values, has_nulls, null, nan)


@dataclass(frozen=True)
class _Atom:
    """A condition on one column."""

    name: str
    expr: pl.Expr
    """All of it, for values that lie in no interval."""
    on_low: tuple[pl.Expr, ...] = ()
    on_high: tuple[pl.Expr, ...] = ()
    never: bool = False
    """No value fulfils it that is not null."""
    values: tuple[pl.Series, ...] = ()
    """It is equal to one of these; none: no matter."""

    def in_interval(self, domain: _Domain) -> Bools:
        """Whether some value between the bounds may fulfil it."""
        may = np.full(domain.low.height, not self.never)
        for exprs, frame in ((self.on_low, domain.low), (self.on_high, domain.high)):
            for expr in exprs:
                may &= _true(frame, expr, unknown=True)
        return may & self._has_value(domain) if self.values else may

    def _has_value(self, domain: _Domain) -> Bools:
        import polars as pl

        found = np.zeros(domain.low.height, dtype=np.bool_)
        for value in self.values:
            column = pl.col(self.name)
            above = _true(domain.low, column <= pl.lit(value), unknown=True)
            found |= above & _true(domain.high, column >= pl.lit(value), unknown=True)
        return found

    def at(self, point: pl.DataFrame) -> bool:
        """Whether the one value fulfils it."""
        return bool(_true(point, self.expr, unknown=False)[0])


@dataclass
class _All:
    """Conditions that must be fulfilled together."""

    atoms: list[_Atom] = field(default_factory=list[_Atom])
    choices: list[tuple[_All, _All]] = field(default_factory=list["tuple[_All, _All]"])
    """Of each one or the other."""

    def names(self) -> Iterator[str]:
        yield from (atom.name for atom in self.atoms)
        for one, other in self.choices:
            yield from one.names()
            yield from other.names()

    def may_hold(self, domains: Mapping[str, _Domain], pieces: int) -> Bools:
        may = np.ones(pieces, dtype=np.bool_)
        for name in {atom.name for atom in self.atoms}:
            if name in domains:
                may &= self._of_column([atom for atom in self.atoms if atom.name == name], domains[name])
        for one, other in self.choices:
            may &= one.may_hold(domains, pieces) | other.may_hold(domains, pieces)
        return may

    @staticmethod
    def _of_column(atoms: Sequence[_Atom], domain: _Domain) -> Bools:
        """One value has to fulfil them all."""
        may = domain.has_values.copy()
        for atom in atoms:
            may &= atom.in_interval(domain)
        nan = domain.nan
        if nan is not None and all(atom.at(nan) for atom in atoms):
            may |= domain.has_values
        if all(atom.at(domain.null) for atom in atoms):
            may |= domain.has_nulls
        return may


def _true(frame: pl.DataFrame, expr: pl.Expr, *, unknown: bool) -> Bools:
    """Where the expression is true; ``unknown`` where it is null."""
    import polars as pl

    try:
        (result,) = frame.select(expr).get_columns()
    except (Exception, pl.exceptions.PanicException):  # the rows themselves will show it
        return np.ones(frame.height, dtype=np.bool_)
    return result.fill_null(unknown).to_numpy()


# ------------------------------------------------------------------------------------------------ from the expression


def _add(all_of: _All, node: Any, expr: pl.Expr) -> None:
    """Add to ``all_of`` what an expression with this tree says; nothing if it is of another kind."""
    kind, content = _kind(node)
    if kind == "Alias":
        return _add(all_of, content[0], expr.meta.pop()[0])
    if kind == "BinaryExpr" and content["op"] in ("And", "LogicalAnd"):
        right, left = expr.meta.pop()
        _add(all_of, content["left"], left)
        return _add(all_of, content["right"], right)
    if kind == "BinaryExpr" and content["op"] in ("Or", "LogicalOr"):
        right, left = expr.meta.pop()
        choice = _All(), _All()
        _add(choice[0], content["left"], left)
        _add(choice[1], content["right"], right)
        all_of.choices.append(choice)
        return None
    atom = _atom(kind, content, expr)
    if atom is not None:
        all_of.atoms.append(atom)
    return None


def _atom(kind: str, content: Any, expr: pl.Expr) -> _Atom | None:
    if kind == "Column":
        return _Atom(content, expr, on_high=(expr,))
    if kind == "BinaryExpr":
        return _comparison(content, expr, expr, opposite=False)
    if kind != "Function" or not isinstance(content["function"], dict):
        return None
    function, options = _kind(content["function"].get("Boolean"))
    inputs, exprs = content["input"], expr.meta.pop()[::-1]
    if function == "Not":
        inner, comparison = _kind(inputs[0])
        return _comparison(comparison, exprs[0], expr, opposite=True) if inner == "BinaryExpr" else None
    name = _column(inputs[0]) if inputs else None
    if name is None:
        return None
    if function in ("IsNull", "IsNotNull"):
        return _Atom(name, expr, never=function == "IsNull")
    if function == "IsBetween" and _is_constant(inputs[1]) and _is_constant(inputs[2]):
        column, least, most = exprs
        closed = options["closed"]
        above = column >= least if closed in ("Both", "Left") else column > least
        below = column <= most if closed in ("Both", "Right") else column < most
        return _Atom(name, expr, on_low=(below,), on_high=(above,))
    if function == "IsIn" and _kind(inputs[1])[0] == "Literal":
        return _is_in(name, expr, exprs[1])
    return None


def _comparison(content: Any, compared: pl.Expr, whole: pl.Expr, *, opposite: bool) -> _Atom | None:
    """A comparison of a column with a constant, or the opposite of one; ``whole`` says all of it."""
    op, nodes = content["op"], (content["left"], content["right"])
    right, left = compared.meta.pop()
    if _is_constant(nodes[0]) and op in _MIRRORED:
        op, nodes, left, right = _MIRRORED[op], nodes[::-1], right, left
    if opposite:
        op = _OPPOSITE.get(op)
    name = _column(nodes[0])
    if name is None or not _is_constant(nodes[1]):
        return None
    on_low = {"Lt": left < right, "LtEq": left <= right, "Eq": left <= right}
    on_high = {"Gt": left > right, "GtEq": left >= right, "Eq": left >= right}
    if op not in on_low and op not in on_high:
        return None
    return _Atom(
        name,
        whole,
        on_low=(on_low[op],) if op in on_low else (),
        on_high=(on_high[op],) if op in on_high else (),
    )


def _is_in(name: str, expr: pl.Expr, values: pl.Expr) -> _Atom | None:
    import polars as pl

    found = pl.select(values.alias("values")).to_series()
    if isinstance(found.dtype, pl.List | pl.Array):
        found = found.explode()
    found = found.drop_nulls()
    if found.dtype.is_float() and found.is_nan().any():
        return None
    if not len(found):
        return _Atom(name, expr, never=True)
    found = found.unique().sort()
    if len(found) > _MAX_VALUES:
        column = pl.col(name)
        return _Atom(
            name, expr, on_low=(column <= pl.lit(found.slice(-1)),), on_high=(column >= pl.lit(found.slice(0, 1)),)
        )
    return _Atom(name, expr, values=tuple(found.slice(place, 1) for place in range(len(found))))


def _kind(node: Any) -> tuple[str, Any]:
    """Kind and content of a node of the tree."""
    if isinstance(node, str):
        return node, {}
    if isinstance(node, dict) and len(node) == 1:
        return next(iter(node.items()))
    return "", {}


def _column(node: Any) -> str | None:
    kind, content = _kind(node)
    return _column(content[0]) if kind == "Alias" else content if kind == "Column" else None


def _is_constant(node: Any) -> bool:
    """One value that stands in the expression."""
    kind, content = _kind(node)
    if kind in ("Alias", "Cast"):
        return _is_constant(content[0] if kind == "Alias" else content["expr"])
    if kind == "Function":  # such as pl.datetime(...)
        return bool(content["input"]) and all(map(_is_constant, content["input"]))
    return kind == "Literal" and _kind(content)[0] in ("Dyn", "Scalar")
