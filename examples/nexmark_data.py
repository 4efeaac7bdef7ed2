"""The events of Nexmark, an auction house: people come, open auctions, and bid.

Event *n* is the same in every run and in every process: everything in it is a function of *n*.  Of each 50 events one
is a new person, three are new auctions and 46 are bids; half of the bids go to a hot auction, three quarters come from
a hot bidder, and most auctions are of hot sellers, as the benchmark's original generator has it (Tucker et al.,
"NEXMark", 2002, and its descendants in Beam and Flink).  The texts and the random numbers are our own.

Columns are computed by NumPy and Arrow for a whole range of rows at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import cutwater as cw

__all__ = ["AUCTIONS", "BIDS", "LONGEST", "PEOPLE", "Auctions", "Bids", "People", "Table", "rows_of", "stream"]

FIRST_ID = 1_000
FIRST_CATEGORY, CATEGORIES = 10, 5
HOT = 100
"""Each hundredth auction, seller and bidder is a hot one, until the next."""
LONGEST = "1m"
"""No auction is open for longer than this, at 60 events a second of event time or more."""
ACTIVE_PEOPLE, IN_FLIGHT_AUCTIONS, LEAD = 1_000, 100, 10
BASE_US = 1_436_918_400_000_000  # 2015-07-15T00:00:00Z

_TIME = pa.timestamp("us", tz="UTC")
PEOPLE = pa.schema(
    [("id", pa.int64()), ("name", pa.string()), ("email", pa.string()), ("credit_card", pa.string()),
     ("city", pa.string()), ("state", pa.string()), ("time", _TIME), ("extra", pa.string())]
)  # fmt: skip
AUCTIONS = pa.schema(
    [("id", pa.int64()), ("item", pa.string()), ("description", pa.string()), ("initial_bid", pa.int64()),
     ("reserve", pa.int64()), ("time", _TIME), ("expires", _TIME), ("seller", pa.int64()), ("category", pa.int64()),
     ("extra", pa.string())]
)  # fmt: skip
BIDS = pa.schema(
    [("auction", pa.int64()), ("bidder", pa.int64()), ("price", pa.int64()), ("channel", pa.string()),
     ("url", pa.string()), ("time", _TIME), ("extra", pa.string())]
)  # fmt: skip

_FIRST = ["Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter", "Walter"]
_LAST = ["Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris"]
_PLACES = [
    ("Phoenix", "AZ"), ("Los Angeles", "CA"), ("San Francisco", "CA"), ("Boise", "ID"), ("Portland", "OR"),
    ("Bend", "OR"), ("Redmond", "WA"), ("Seattle", "WA"), ("Kent", "WA"), ("Cheyenne", "WY"),
]  # fmt: skip
_HOT_CHANNELS = ("Google", "Facebook", "Baidu", "Apple")
_CHANNELS = 10_000


# ------------------------------------------------------------------------------------------------------------ numbers


def mixed(numbers: np.ndarray, salt: int) -> np.ndarray:
    """Random-looking 63-bit numbers, a function of number and salt (the finisher of splitmix64).

    >>> mixed(np.array([1, 2]), 0).tolist() == mixed(np.array([1, 2, 3]), 0)[:2].tolist()
    True
    """
    x = numbers.astype(np.uint64)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x += np.uint64(salt * 0xD1342543DE82EF95 % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    x >>= np.uint64(1)
    return x.view(np.int64)


def _price(events: np.ndarray, salt: int) -> np.ndarray:
    """From 1 to 10^6 in units of a hundredth, evenly spread over the orders of magnitude."""
    return np.rint(10.0 ** (mixed(events, salt) % 1_000_003 / 1_000_003 * 6.0) * 100).astype(np.int64)


_TEXTS: dict[tuple[int, int], np.ndarray] = {}


def _text(events: np.ndarray, salt: int, length: int) -> pa.Array:
    """One text of a fixed length for each event, out of a thousand."""
    texts = _TEXTS.get((salt, length))
    if texts is None:
        letters = mixed(np.arange(1_000 * length), salt + 1_000) % 26 + ord("a")
        texts = _TEXTS[salt, length] = letters.astype(np.uint8).reshape(1_000, length)
    body = texts[mixed(events, salt) % 1_000]
    offsets = np.arange(len(events) + 1, dtype=np.int32) * length
    return pa.StringArray.from_buffers(len(events), pa.py_buffer(offsets), pa.py_buffer(body))


def _times(events: np.ndarray, per_second: int) -> np.ndarray:
    return BASE_US + events * 1_000_000 // per_second


def _as_time(micros: np.ndarray) -> pa.Array:
    return pa.array(micros, pa.int64()).cast(_TIME)


def _pick(texts: list[str], index: np.ndarray) -> pa.Array:
    return pa.array(texts).take(pa.array(index))


# ------------------------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class People:
    """``fn(start, count)`` for ``cw.generate``: the people, by their own numbers.

    >>> People(10_000)(0, 2).select(["id", "time"]).to_pylist()[1]["id"]
    1001
    """

    per_second: int
    schema: ClassVar[pa.Schema] = PEOPLE
    share: ClassVar[int] = 1
    """Of 50 events."""

    def __call__(self, start: int, count: int) -> pa.RecordBatch:
        number = np.arange(start, start + count, dtype=np.int64)
        event = number * 50
        first, last = _pick(_FIRST, mixed(event, 1) % len(_FIRST)), _pick(_LAST, mixed(event, 2) % len(_LAST))
        place = mixed(event, 3) % len(_PLACES)
        card = pa.array(mixed(event, 4) % 10**16).cast(pa.string())
        columns = [
            pa.array(number + FIRST_ID),
            pc.binary_join_element_wise(first, last, " "),
            pc.binary_join_element_wise(_text(event, 5, 7), "@", _text(event, 6, 5), ".com", ""),
            pc.utf8_lpad(card, 16, "0"),
            _pick([city for city, _ in _PLACES], place),
            _pick([state for _, state in _PLACES], place),
            _as_time(_times(event, self.per_second)),
            _text(event, 7, 80),
        ]
        return pa.record_batch(columns, schema=PEOPLE)


@dataclass(frozen=True)
class Auctions:
    """``fn(start, count)`` for ``cw.generate``: the auctions, by their own numbers."""

    per_second: int
    schema: ClassVar[pa.Schema] = AUCTIONS
    share: ClassVar[int] = 3

    def __call__(self, start: int, count: int) -> pa.RecordBatch:
        number = np.arange(start, start + count, dtype=np.int64)
        event = number // 3 * 50 + 1 + number % 3
        newest = event // 50
        active = np.minimum(newest, ACTIVE_PEOPLE)
        cold = newest - active + mixed(event, 11) % (active + LEAD)
        seller = np.where(mixed(event, 12) % 4 > 0, newest // HOT * HOT, cold)
        initial = _price(event, 13)
        at = _times(event, self.per_second)
        horizon = IN_FLIGHT_AUCTIONS * 50 * 1_000_000 // (3 * self.per_second)
        lasts = 1_000 * (1 + mixed(event, 14) % max(1, 2 * horizon // 1_000))
        columns = [
            pa.array(number + FIRST_ID),
            _text(event, 15, 20),
            _text(event, 16, 100),
            pa.array(initial),
            pa.array(initial + _price(event, 17)),
            _as_time(at),
            _as_time(at + lasts),
            pa.array(seller + FIRST_ID),
            pa.array(FIRST_CATEGORY + mixed(event, 18) % CATEGORIES),
            _text(event, 19, 200),
        ]
        return pa.record_batch(columns, schema=AUCTIONS)


@dataclass(frozen=True)
class Bids:
    """``fn(start, count)`` for ``cw.generate``: the bids, by their own numbers."""

    per_second: int
    schema: ClassVar[pa.Schema] = BIDS
    share: ClassVar[int] = 46

    def __call__(self, start: int, count: int) -> pa.RecordBatch:
        number = np.arange(start, start + count, dtype=np.int64)
        event = number // 46 * 50 + 4 + number % 46
        newest_person, newest_auction = event // 50, event // 50 * 3 + 2
        oldest = np.maximum(newest_auction - IN_FLIGHT_AUCTIONS, 0)
        cold = oldest + mixed(event, 21) % (newest_auction - oldest + 1 + LEAD)
        auction = np.where(mixed(event, 22) % 2 > 0, newest_auction // HOT * HOT, cold)
        active = np.minimum(newest_person, ACTIVE_PEOPLE)
        cold = newest_person - active + mixed(event, 23) % (active + LEAD)
        bidder = np.where(mixed(event, 24) % 4 > 0, newest_person // HOT * HOT + 1, cold)
        hot = mixed(event, 25) % 2 > 0
        channel = pa.array(np.where(hot, mixed(event, 26) % 4, 4 + mixed(event, 27) % _CHANNELS))
        columns = [
            pa.array(auction + FIRST_ID),
            pa.array(bidder + FIRST_ID),
            pa.array(_price(event, 28)),
            _NAMES.take(channel),
            _URLS.take(channel),
            _as_time(_times(event, self.per_second)),
            _text(event, 29, 30),
        ]
        return pa.record_batch(columns, schema=BIDS)


def _addresses() -> pa.Array:
    """One for each channel: three folders and a query; those of the hot channels do not name the channel."""
    number = np.arange(4 + _CHANNELS)
    folders = [_text(number, 31 + i, 3 + i) for i in range(3)]
    base = pc.binary_join_element_wise("https://auctions.example", *folders, "item.htm?query=1", "/")
    channel = pc.binary_join_element_wise(base, pa.array(number - 4).cast(pa.string()), "&channel_id=")
    return pc.if_else(pa.array(number < 4), base, channel)


_NAMES = pa.array([*_HOT_CHANNELS, *(f"channel-{i}" for i in range(_CHANNELS))])
_URLS = _addresses()


# ------------------------------------------------------------------------------------------------------------ streams


Table: TypeAlias = People | Auctions | Bids


def rows_of(table: Table, events: int) -> int:
    """How many of the first ``events`` events are rows of a table.

    >>> [rows_of(t(1), 100) for t in (People, Auctions, Bids)], [rows_of(t(1), 53) for t in (People, Auctions, Bids)]
    ([2, 6, 92], [2, 5, 46])
    """
    first = {1: 0, 3: 1, 46: 4}[table.share]
    return events // 50 * table.share + min(table.share, max(0, events % 50 - first))


def stream(
    flow: cw.Dataflow, table: Table, events: int, *, partitions: int = 2, rate: float | None = None
) -> cw.Stream:
    """A table as a stream of the dataflow, in the order of its event time ``time``; ``rate`` is events per second."""
    name = type(table).__name__.lower()
    source = cw.generate(
        table,
        schema=table.schema,
        rows=rows_of(table, events),
        partitions=partitions,
        rate=rate and rate * table.share / 50,
    )
    return flow.read(name, source, event_time="time", out_of_order="2s")
