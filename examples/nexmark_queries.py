"""The queries of Nexmark as dataflows, each with the SQL that says what has to come out.

    query.build(Tables(flow, events))  ->  the result stream
    query.sql                          ->  the same over tables ``person``, ``auction`` and ``bid``

``key`` names the columns by which a result is updated: the row of each with the highest ``order`` is the result.
Without it, every row is; a column ``op`` tells the rows that were taken back again.  ``summed`` names the columns of
windows by the clock whose sums by ``key`` are the result: where the windows lie differs from one run to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import nexmark_data as nx
import polars as pl
import pyarrow as pa

import cutwater as cw

__all__ = ["QUERIES", "Query", "Tables", "side_input"]

SIDE_KEYS = 1_000
FOR_EVER = "3650d"


class Tables:
    """The three streams of a dataflow; only those that a query asks for are read.

    Args:
        events: how many events, over all streams.
        per_second: events per second of event time.
        rate: events per second of real time; None for as fast as it goes.
    """

    def __init__(self, flow: cw.Dataflow, events: int, per_second: int = 10_000, rate: float | None = None) -> None:
        self._flow, self._events, self._per_second, self._rate = flow, events, per_second, rate

    @cached_property
    def person(self) -> cw.Stream:
        return self._read(nx.People(self._per_second))

    @cached_property
    def auction(self) -> cw.Stream:
        return self._read(nx.Auctions(self._per_second))

    @cached_property
    def bid(self) -> cw.Stream:
        return self._read(nx.Bids(self._per_second))

    def _read(self, table: nx.Table) -> cw.Stream:
        return nx.stream(self._flow, table, self._events, rate=self._rate)


@dataclass(frozen=True)
class Query:
    """A query; see the module."""

    name: str
    about: str
    build: Callable[[Tables], cw.Stream]
    sql: str
    key: tuple[str, ...] | None = None
    order: str = "bids"
    summed: tuple[str, ...] = ()


# --------------------------------------------------------------------------------------------------- one row at a time


def q0(t: Tables) -> cw.Stream:
    return t.bid.select("pass", "auction", "bidder", "price", "time", "extra")


def q1(t: Tables) -> cw.Stream:
    return t.bid.select("euros", "auction", "bidder", "time", "extra", price=pl.col("price") * 0.908)


def q2(t: Tables) -> cw.Stream:
    return t.bid.filter("some", pl.col("auction") % 123 == 0).select("slim", "auction", "price")


def q10(t: Tables) -> cw.Stream:
    time = pl.col("time").dt
    return t.bid.select("dated", "auction", "bidder", "price", "time", "extra", day=time.strftime("%Y-%m-%d"),
                        minute=time.strftime("%H:%M"))  # fmt: skip


def side_input() -> pa.Table:
    """The bounded table that q13 looks bids up in."""
    return pa.table({"side": list(range(SIDE_KEYS)), "value": [f"value {i}" for i in range(SIDE_KEYS)]})


def q13(t: Tables) -> cw.Stream:
    sided = t.bid.with_columns("side", side=pl.col("auction") % SIDE_KEYS)
    return sided.enrich("value", side_input(), on="side").select("slim", "auction", "bidder", "price", "time", "value")


def q14(t: Tables) -> cw.Stream:
    euros, hour = pl.col("price") * 0.908, pl.col("time").dt.hour()
    part = pl.when(hour.is_between(8, 18)).then(pl.lit("day")).when((hour <= 6) | (hour >= 20)).then(pl.lit("night"))
    return t.bid.filter("dear", euros > 1_000_000, euros < 50_000_000).select(
        "told", "auction", "bidder", "time", price=euros, part=part.otherwise(pl.lit("other")),
        cs=pl.col("extra").str.count_matches("c", literal=True).cast(pl.Int64),
    )  # fmt: skip


def q21(t: Tables) -> cw.Stream:
    known = {"apple": "0", "google": "1", "facebook": "2", "baidu": "3"}
    found = pl.col("url").str.extract(r"[&?]channel_id=([^&]*)", 1)
    number = pl.col("channel").str.to_lowercase().replace_strict(known, default=found, return_dtype=pl.String)
    named = t.bid.select("channel", "auction", "bidder", "price", "channel", channel_id=number)
    return named.filter("known", pl.col("channel_id").is_not_null())


def q22(t: Tables) -> cw.Stream:
    folders = pl.col("url").str.split("/").list
    return t.bid.select("folders", "auction", "bidder", "price", "channel",
                        dir1=folders.get(3), dir2=folders.get(4), dir3=folders.get(5))  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- joins


def q3(t: Tables) -> cw.Stream:
    west = t.person.filter("west", pl.col("state").is_in(["OR", "ID", "CA"]))
    tens = t.auction.filter("tens", pl.col("category") == 10).rename("of", {"id": "auction"})
    sold = tens.key_by("seller").join("sold", west.key_by("id"), within=("-" + FOR_EVER, FOR_EVER))
    return sold.select("slim", "name", "city", "state", "auction")


def q8(t: Tables) -> cw.Stream:
    sellers = t.auction.select("sells", "seller", "time").key_by("seller")
    people = t.person.select("joins", "id", "name", "time").key_by("id")
    new = people.join("new", sellers, window=cw.tumbling("10s"), how="semi")
    return new.select("slim", "id", "name", "window_start")


def q20(t: Tables) -> cw.Stream:
    tens = t.auction.filter("tens", pl.col("category") == 10).select("slim", "id", "item", "seller", "time")
    bids = t.bid.select("plain", "auction", "bidder", "price", "channel", "time")
    joined = bids.key_by("auction").join("expanded", tens.key_by("id"), within=("-" + FOR_EVER, FOR_EVER))
    return joined.select("told", "auction", "bidder", "price", "channel", "time", "item", "seller")


def bids_in_time(t: Tables, of_auction: tuple[str, ...], of_bid: tuple[str, ...]) -> cw.Stream:
    """Each bid with its auction, which has to be open at the time of the bid; with these columns of both."""
    auctions = t.auction.select("slim", "id", "time", "expires", *of_auction).key_by("id")
    bids = t.bid.select("plain", "auction", "time", *of_bid).key_by("auction")
    pairs = bids.join("offers", auctions, within=("-" + nx.LONGEST, 0))
    inside = pairs.filter("inside", pl.col("time") <= pl.col("expires"))
    return inside.with_event_time("expires")


CLOSING = "100ms"
"""An auction lies in one window, that of its end; those of the same stretch of time are told of together."""


def q9(t: Tables) -> cw.Stream:
    offers = bids_in_time(t, ("item", "seller", "category"), ("price", "bidder"))
    sales = offers.key_by("auction").window("closing", cw.tumbling(CLOSING))
    return sales.top("winners", 1, by=["price", "time"], descending=[True, False]).select(
        "told", "auction", "item", "seller", "category", "price", "bidder", expires=pl.col("expires").dt.epoch("us")
    )


def q4(t: Tables) -> cw.Stream:
    offers = bids_in_time(t, ("category",), ("price",))
    sales = offers.key_by("auction", "category").window("closing", cw.tumbling(CLOSING))
    dearest = sales.aggregate("dearest", price=cw.max("price"))
    return dearest.key_by("category").aggregate("mean", sold=cw.count(), price=cw.mean("price"))


# ---------------------------------------------------------------------------------------------------- your own logic


class LastTen(cw.ProcessFunction):
    """The mean of the newest ten prices of each key, whatever the order in which they come."""

    newest = cw.ListState("array<long>")
    sold = cw.ValueState("long")

    def process(self, row, ctx):
        ten = sorted([*self.newest, [row["expires"], row["auction"], row["price"]]])[-10:]
        self.newest.set(ten)
        self.sold.value = self.sold.get(0) + 1
        yield {"seller": ctx.key, "sold": self.sold.value, "price": sum(price for _, _, price in ten) / len(ten)}


def q6(t: Tables) -> cw.Stream:
    return q9(t).key_by("seller").process("last-ten", LastTen(), "seller long, sold long, price double")


# ----------------------------------------------------------------------------------------------- windows, aggregates


def q7(t: Tables) -> cw.Stream:
    lanes = t.bid.with_columns("lanes", lane=pl.col("auction") % 64)
    tops = lanes.key_by("lane").window("ten", cw.tumbling("10s")).aggregate("lane-top", price=cw.max("price"))
    whole = tops.with_columns("one", all=pl.lit(0, pl.Int64)).key_by("all")
    top = whole.window("all-lanes", cw.tumbling("10s")).aggregate("top", price=cw.max("price"))
    top = top.with_event_time("window_end")
    slim = t.bid.select("slim", "auction", "price", "bidder", "time")
    pairs = slim.key_by("price").join("who", top.key_by("price"), within=(0, "10s"))
    inside = pairs.filter("inside", pl.col("time") >= pl.col("window_start"), pl.col("time") < pl.col("window_end"))
    return inside.select("told", "auction", "price", "bidder", "time", "window_start")


def q5(t: Tables) -> cw.Stream:
    windows = t.bid.key_by("auction").window("ten", cw.sliding("10s", "2s")).aggregate("count", bids=cw.count())
    counts = windows.rename("begin", window_start="start", window_end="end").with_event_time("end")
    most = counts.key_by("start").window("most-of", cw.tumbling("2s")).aggregate("most", bids=cw.max("bids"))
    most = most.with_event_time("window_end")
    hot = counts.key_by("start", "bids").join("hot", most.key_by("start", "bids"), within=(0, "2s"))
    return hot.select("told", "auction", "bids", "start")


def q11(t: Tables) -> cw.Stream:
    sessions = t.bid.key_by("bidder").window("sessions", cw.session("10s")).aggregate("count", bids=cw.count())
    return sessions.select("told", "bidder", "bids", "window_start", "window_end")


def q12(t: Tables) -> cw.Stream:
    windows = t.bid.key_by("bidder").window("ten", cw.tumbling("10s", time="processing"))
    return windows.aggregate("count", bids=cw.count())


def q18(t: Tables) -> cw.Stream:
    return _plain(t).key_by("bidder", "auction").top("last", 1, by=["time", "price"])


def q19(t: Tables) -> cw.Stream:
    return _plain(t).key_by("auction").top("ten", 10, by=["price", "time"], descending=[True, False], rank="place")


def _plain(t: Tables) -> cw.Stream:
    return t.bid.select("plain", "auction", "bidder", "price", "channel", "time")


def _ranks() -> dict[str, pl.Expr]:
    price = pl.col("price")
    low, middle = price < 10_000, price < 1_000_000
    ranks = {"low": low, "middle": ~low & middle, "high": ~middle}
    return {name: pl.when(inside).then(1) for name, inside in ranks.items()}


def q17(t: Tables) -> cw.Stream:
    ranked = t.bid.with_columns("ranked", day=pl.col("time").dt.strftime("%Y-%m-%d"), **_ranks())
    return ranked.key_by("auction", "day").aggregate(
        "stats", bids=cw.count(), low=cw.count("low"), middle=cw.count("middle"), high=cw.count("high"),
        least=cw.min("price"), most=cw.max("price"), mean=cw.mean("price"), total=cw.sum("price"),
    )  # fmt: skip


def _distinct() -> dict[str, Any]:
    """Counts of bids, bidders and auctions, over all and by rank of the price."""
    ranks = ("low", "middle", "high")
    calls = {"bids": cw.count()} | {f"bids_{r}": cw.count(r) for r in ranks}
    for column in ("bidder", "auction"):
        calls |= {f"{column}s": cw.count_distinct(column)}
        calls |= {f"{column}s_{r}": cw.count_distinct(f"{column}_{r}") for r in ranks}
    return calls


def _by_rank(t: Tables) -> cw.Stream:
    ranked = t.bid.with_columns("ranked", day=pl.col("time").dt.strftime("%Y-%m-%d"), **_ranks())
    of = {f"{c}_{r}": pl.when(pl.col(r) == 1).then(pl.col(c)) for c in ("bidder", "auction") for r in _ranks()}
    return ranked.with_columns("of-rank", **of)


def q15(t: Tables) -> cw.Stream:
    return _by_rank(t).key_by("day").aggregate("stats", **_distinct())


def q16(t: Tables) -> cw.Stream:
    return _by_rank(t).key_by("channel", "day").aggregate("stats", **_distinct())


_RANKS = {"low": "price < 10000", "middle": "price >= 10000 AND price < 1000000", "high": "price >= 1000000"}
_DISTINCT = ", ".join(
    f"count({of}) FILTER ({inside}) AS {name}{suffix}"
    for of, name in (("*", "bids"), ("DISTINCT bidder", "bidders"), ("DISTINCT auction", "auctions"))
    for suffix, inside in {"": "true", **{f"_{r}": inside for r, inside in _RANKS.items()}}.items()
)
_WINNERS = """(SELECT a.id AS auction, a.item, a.seller, a.category, b.price, b.bidder, epoch_us(a.expires) AS expires
    FROM auction a JOIN bid b ON a.id = b.auction AND b.time BETWEEN a.time AND a.expires
    QUALIFY row_number() OVER (PARTITION BY a.id ORDER BY b.price DESC, b.time) = 1)"""
_WINDOW = "time_bucket(INTERVAL '10 seconds', time)"
QUERIES: dict[str, Query] = {
    q.name: q
    for q in (
        Query("q0", "pass through", q0, "SELECT auction, bidder, price, time, extra FROM bid"),
        Query(
            "q1", "currency conversion", q1,
            "SELECT auction, bidder, time, extra, price * 0.908::DOUBLE AS price FROM bid",
        ),
        Query("q2", "selection", q2, "SELECT auction, price FROM bid WHERE auction % 123 = 0"),
        Query(
            "q3", "local item suggestion", q3,
            "SELECT p.name, p.city, p.state, a.id AS auction FROM auction a JOIN person p ON a.seller = p.id "
            "WHERE a.category = 10 AND p.state IN ('OR', 'ID', 'CA')",
        ),
        Query(
            "q4", "mean price of a category", q4,
            f"SELECT category, count(*) AS sold, avg(price) AS price FROM {_WINNERS} GROUP BY category",
            ("category",), "sold",
        ),
        Query(
            "q5", "hot items", q5,
            """WITH slid AS (SELECT auction, unnest(generate_series(time_bucket(INTERVAL '2 seconds', time) -
                     INTERVAL '8 seconds', time_bucket(INTERVAL '2 seconds', time), INTERVAL '2 seconds')) AS start
                   FROM bid)
               SELECT auction, count(*) AS bids, start FROM slid GROUP BY auction, start
               QUALIFY count(*) = max(count(*)) OVER (PARTITION BY start)""",
        ),
        Query(
            "q6", "mean price of a seller", q6,
            f"""SELECT seller, max(sold) AS sold, avg(price) AS price FROM
                (SELECT *, row_number() OVER (PARTITION BY seller ORDER BY expires DESC, auction DESC) AS place,
                   count(*) OVER (PARTITION BY seller) AS sold FROM {_WINNERS})
                WHERE place <= 10 GROUP BY seller""",
            ("seller",), "sold",
        ),
        Query(
            "q7", "highest bid", q7,
            f"""SELECT auction, price, bidder, time, {_WINDOW} AS window_start FROM bid
                QUALIFY price = max(price) OVER (PARTITION BY {_WINDOW})""",
        ),
        Query(
            "q8", "monitor new users", q8,
            """SELECT DISTINCT p.id, p.name, p.start AS window_start
               FROM (SELECT *, time_bucket(INTERVAL '10 seconds', time) AS start FROM person) p
               JOIN (SELECT *, time_bucket(INTERVAL '10 seconds', time) AS start FROM auction) a
               ON p.id = a.seller AND p.start = a.start""",
        ),
        Query("q9", "winning bids", q9, f"SELECT * FROM {_WINNERS}"),
        Query(
            "q10", "log to files", q10,
            "SELECT auction, bidder, price, time, extra, strftime(time, '%Y-%m-%d') AS day, "
            "strftime(time, '%H:%M') AS minute FROM bid",
        ),
        Query(
            "q11", "sessions of bidders", q11,
            """WITH cut AS (SELECT *, time - lag(time) OVER w > INTERVAL '10 seconds' AS begins FROM bid
                            WINDOW w AS (PARTITION BY bidder ORDER BY time)),
                    numbered AS (SELECT *, count(*) FILTER (begins) OVER (PARTITION BY bidder ORDER BY time) AS n
                                 FROM cut)
               SELECT bidder, count(*) AS bids, min(time) AS window_start,
                 max(time) + INTERVAL '10 seconds' AS window_end FROM numbered GROUP BY bidder, n""",
        ),
        Query(
            "q12", "bids of ten seconds by the clock", q12,
            "SELECT bidder, count(*) AS bids FROM bid GROUP BY bidder", ("bidder",), summed=("bids",),
        ),
        Query(
            "q13", "bounded side input", q13,
            f"SELECT auction, bidder, price, time, 'value ' || (auction % {SIDE_KEYS}) AS value FROM bid",
        ),
        Query(
            "q14", "calculation", q14,
            """SELECT auction, bidder, time, price * 0.908::DOUBLE AS price,
                 CASE WHEN hour(time) BETWEEN 8 AND 18 THEN 'day'
                      WHEN hour(time) <= 6 OR hour(time) >= 20 THEN 'night' ELSE 'other' END AS part,
                 len(extra) - len(replace(extra, 'c', '')) AS cs
               FROM bid WHERE price * 0.908::DOUBLE > 1000000 AND price * 0.908::DOUBLE < 50000000""",
        ),
        Query(
            "q15", "bidding statistics", q15,
            f"SELECT strftime(time, '%Y-%m-%d') AS day, {_DISTINCT} FROM bid GROUP BY ALL", ("day",),
        ),
        Query(
            "q16", "statistics by channel", q16,
            f"SELECT channel, strftime(time, '%Y-%m-%d') AS day, {_DISTINCT} FROM bid GROUP BY ALL", ("channel", "day"),
        ),
        Query(
            "q17", "auction statistics", q17,
            """SELECT auction, strftime(time, '%Y-%m-%d') AS day, count(*) AS bids,
                 count(*) FILTER (price < 10000) AS low, count(*) FILTER (price >= 10000 AND price < 1000000) AS middle,
                 count(*) FILTER (price >= 1000000) AS high, min(price) AS least, max(price) AS most,
                 avg(price) AS mean, sum(price)::BIGINT AS total
               FROM bid GROUP BY ALL""",
            ("auction", "day"),
        ),
        Query(
            "q18", "last bid of each bidder", q18,
            """SELECT auction, bidder, price, channel, time FROM bid
               QUALIFY row_number() OVER (PARTITION BY bidder, auction ORDER BY time DESC, price DESC) = 1""",
        ),
        Query(
            "q19", "ten highest bids", q19,
            """SELECT auction, bidder, price, channel, time,
                 row_number() OVER (PARTITION BY auction ORDER BY price DESC, time) AS place
               FROM bid QUALIFY place <= 10""",
        ),
        Query(
            "q20", "bids with their auction", q20,
            """SELECT b.auction, b.bidder, b.price, b.channel, b.time, a.item, a.seller
               FROM bid b JOIN auction a ON b.auction = a.id WHERE a.category = 10""",
        ),
        Query(
            "q21", "channel number", q21,
            r"""SELECT auction, bidder, price, channel,
                  CASE lower(channel) WHEN 'apple' THEN '0' WHEN 'google' THEN '1' WHEN 'facebook' THEN '2'
                    WHEN 'baidu' THEN '3' ELSE regexp_extract(url, '[&?]channel_id=([^&]*)', 1) END AS channel_id
                FROM bid""",
        ),
        Query(
            "q22", "folders of the address", q22,
            "SELECT auction, bidder, price, channel, split_part(url, '/', 4) AS dir1, split_part(url, '/', 5) AS dir2, "
            "split_part(url, '/', 6) AS dir3 FROM bid",
        ),
    )
}  # fmt: skip
