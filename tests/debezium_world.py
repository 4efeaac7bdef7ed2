"""A table that changes at random, and the change events that Debezium writes of it."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Form = Literal["plain", "enveloped"]
FIELDS: tuple[dict[str, Any], ...] = (
    {"type": "int64", "optional": False, "field": "id"},
    {"type": "string", "optional": True, "field": "city"},
    {
        "type": "bytes",
        "optional": True,
        "name": "org.apache.kafka.connect.data.Decimal",
        "version": 1,
        "parameters": {"scale": "2", "connect.decimal.precision": "12"},
        "field": "price",
    },
    {"type": "int64", "optional": True, "name": "io.debezium.time.MicroTimestamp", "version": 1, "field": "at"},
)
SCHEMA = "id long, city string, price decimal(12, 2), at timestamp_ntz"


def connect_schema(fields: Sequence[dict[str, Any]] = FIELDS) -> dict[str, Any]:
    """The schema that Kafka Connect's converter puts in front."""
    row = {"type": "struct", "fields": list(fields), "optional": True, "name": "shop.public.orders.Value"}
    source = {"type": "struct", "fields": [{"type": "string", "optional": False, "field": "db"}], "optional": False}
    return {
        "type": "struct",
        "fields": [
            {**row, "field": "before"},
            {**row, "field": "after"},
            {**source, "name": "io.debezium.connector.postgresql.Source", "field": "source"},
            {"type": "string", "optional": False, "field": "op"},
            {"type": "int64", "optional": True, "field": "ts_ms"},
        ],
        "optional": False,
        "name": "shop.public.orders.Envelope",
    }


def unscaled(value: int) -> str:
    """A decimal's digits as Debezium writes them in JSON."""
    return base64.b64encode(value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)).decode()


def event(op: str, before: Any, after: Any, form: Form = "plain", schema: Any = None, **more: Any) -> bytes:
    """The value of a message."""
    source = {"version": "3.0", "connector": "postgresql", "db": "shop", "schema": "public", "table": "orders", **more}
    payload = {
        "before": before,
        "after": after,
        "source": source,
        "transaction": None,
        "op": op,
        "ts_ms": 1767225600000,
    }
    if form == "plain":
        return json.dumps(payload).encode()
    return json.dumps({"schema": connect_schema() if schema is None else schema, "payload": payload}).encode()


@dataclass
class Orders:
    """A table of orders: each call of ``events`` changes some of it.

    Args:
        identity: what events say of rows as they were: all of it (``"full"``), or the key of those that leave.
    """

    seed: int
    identity: Literal["full", "default"] = "full"
    form: Form = "plain"
    rows: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    next_id: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._lsn = 0

    def events(self, count: int) -> Iterator[tuple[str, bytes | None]]:
        """Key and value of so many messages and some more, tombstones among them."""
        for _ in range(count):
            yield from self._change()

    def _change(self) -> Iterator[tuple[str, bytes | None]]:
        kind = self._random.random()
        if not self.rows or kind < 0.4:
            id, self.next_id = self.next_id, self.next_id + 1
            self.rows[id] = self._row(id)
            yield self._message("r" if kind < 0.1 else "c", None, self.rows[id])
            return
        id = self._random.choice(list(self.rows))
        before = self.rows[id]
        if kind < 0.8:
            self.rows[id] = self._row(id)
            yield self._message("u", before if self.identity == "full" else None, self.rows[id])
            return
        del self.rows[id]
        key_only = {**dict.fromkeys(before), "id": id}
        yield self._message("d", before if self.identity == "full" else key_only, None)
        yield json.dumps({"id": id}), None

    def _row(self, id: int) -> dict[str, Any]:
        cents = self._random.randrange(-50_000, 50_000)
        return {
            "id": id,
            "city": self._random.choice(["Graz", "Linz", "Wien", None]),
            "price": unscaled(cents) if self._random.random() < 0.9 else None,
            "at": self._random.randrange(10**15, 2 * 10**15),
        }

    def _message(self, op: str, before: Any, after: Any) -> tuple[str, bytes]:
        self._lsn += 8
        id = (after or before)["id"]
        return json.dumps({"id": id}), event(op, before, after, self.form, lsn=self._lsn, ts_ms=self._lsn)

    def table(self) -> list[dict[str, Any]]:
        """The rows as they are now, with prices in cents."""
        return [{**row, "cents": cents_of(row["price"])} for row in self.rows.values()]


def cents_of(price: str | None) -> int | None:
    return None if price is None else int.from_bytes(base64.b64decode(price), "big", signed=True)
