"""Rows of the programs that go from topic to topic: 100 bytes of JSON, made from a number, and what comes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = [
    "OUT_OF_ORDER_MS",
    "PAGES",
    "PAGE_AT",
    "PAGE_WIDTH",
    "PER_MINUTE",
    "SCHEMA",
    "WIDTH",
    "columns",
    "encoded",
    "last_row",
    "windows",
]

WIDTH, PAGES, PER_MINUTE, OUT_OF_ORDER_MS = 100, 1_000, 100_000, 1_000
SCHEMA = "ts timestamp_ntz, user long, page string, kind string, cents long"
_KINDS = (b"view", b"click", b"buy")
_TEXT = b'{"ts": "2026-01-01T00:00:00.000", "user": 1234567, "page": "p123", "kind": "@", "cents": 12345}'
PAGE_AT, PAGE_WIDTH = _TEXT.index(b"p123"), 4
"""Where in a message its page lies."""
_FIRST_MS = 60_000
_LAST_MS = 20 * 86_400_000
"""A row so late in event time closes all windows."""

Columns = dict[str, npt.NDArray[np.int64]]


def columns(numbers: npt.NDArray[Any]) -> Columns:
    """Event time (ms since 2026-01-01), user, page, kind and cents of rows.

    >>> columns(np.arange(2))["page"].tolist()
    [789, 730]
    """
    mixed = _mixed(numbers.astype(np.uint64))
    share = (mixed >> np.uint64(10)) % np.uint64(20)
    late = (mixed >> np.uint64(50)).astype(np.int64) % OUT_OF_ORDER_MS
    return {
        "ms": _FIRST_MS + numbers.astype(np.int64) * 60_000 // PER_MINUTE - late,
        "user": 1_000_000 + ((mixed >> np.uint64(16)) % np.uint64(9_000_000)).astype(np.int64),
        "page": (mixed % np.uint64(PAGES)).astype(np.int64),
        "kind": np.where(share < 10, 0, np.where(share < 17, 1, 2)).astype(np.int64),
        "cents": 10_000 + ((mixed >> np.uint64(40)) % np.uint64(90_000)).astype(np.int64),
    }


def encoded(rows: Columns) -> npt.NDArray[np.uint8]:
    """The messages, one in each line of the matrix.

    >>> bytes(encoded(columns(np.arange(1)))[0]).decode().rstrip()
    '{"ts": "2026-01-01T00:00:59.460", "user": 6217355, "page": "p789", "kind": "view", "cents": 13494}'
    """
    made = np.full((len(rows["ms"]), WIDTH), ord(" "), np.uint8)
    for number, kind in enumerate(_KINDS):
        of = rows["kind"] == number
        text = _TEXT.replace(b"@", kind)
        part = np.tile(np.frombuffer(text.ljust(WIDTH), np.uint8), (int(of.sum()), 1))
        ms = rows["ms"][of]
        for at, width, value in (
            (16, 2, 1 + ms // 86_400_000),
            (19, 2, ms // 3_600_000 % 24),
            (22, 2, ms // 60_000 % 60),
            (25, 2, ms // 1_000 % 60),
            (28, 3, ms % 1_000),
            (42, 7, rows["user"][of]),
            (61, 3, rows["page"][of]),
            (text.rindex(b"12345}"), 5, rows["cents"][of]),
        ):
            _put(part, at, width, value)
        made[of] = part
    return made


def last_row() -> npt.NDArray[np.uint8]:
    """The message that closes all windows of its partition."""
    one = np.ones(1, np.int64)
    return encoded(
        {"ms": one * _LAST_MS, "user": one * 1_000_000, "page": one * 0, "kind": one * 2, "cents": one * 10_000}
    )


def windows(rows: int) -> list[tuple[str, str, int, int]]:
    """What the first rows lead to, by DuckDB: for each minute and page, of all kinds but views, how many and cents."""
    import duckdb

    made = columns(np.arange(rows))
    table = pa.table({name: made[name] for name in ("ms", "page", "kind", "cents")})
    sql = (
        "SELECT strftime(TIMESTAMP '2026-01-01' + INTERVAL (ms // 60000) MINUTE, '%Y-%m-%d %H:%M:%S') AS w, "
        "printf('p%03d', page) AS page, count(*)::BIGINT, sum(cents)::BIGINT FROM made WHERE kind <> 0 GROUP BY ALL "
        "ORDER BY ALL"
    )
    with duckdb.connect(config={"threads": 2}) as connection:
        connection.register("made", table)
        return connection.execute(sql).fetchall()


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The end of SplitMix64."""
    mixed = numbers + np.uint64(1)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _put(part: npt.NDArray[np.uint8], at: int, width: int, value: npt.NDArray[np.int64]) -> None:
    for digit in range(width - 1, -1, -1):
        part[:, at + digit] = ord("0") + value % 10
        value = value // 10
