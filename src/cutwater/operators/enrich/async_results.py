"""What leaves a step that asks somebody outside, as it lies in a determinant log (R0): nothing but chance has decided
it."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import pyarrow as pa


class Run(NamedTuple):
    """Neighbours, of the rows that are kept in the order in which they came, that leave together."""

    skipped: int
    """Rows between the run before and this one: they stay."""
    rows: int
    late: bool
    """They got no answer in time, and leave as they came."""


class _Taken(NamedTuple):
    runs: list[Run]
    made: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Taken).decode


def encode_answers(runs: list[Run], made: pa.RecordBatch | None) -> bytes:
    """What leaves at one time.

    Args:
        runs: of which rows.
        made: the rows made of those that are not late; ``None``: none.

    >>> made = pa.record_batch({"n": [4, 9]})
    >>> decode_answers(encode_answers([Run(1, 2, False)], made), made.schema)[0]
    [Run(skipped=1, rows=2, late=False)]
    """
    return _encode(_Taken(runs, b"" if made is None else made.serialize().to_pybytes()))


def decode_answers(data: bytes, schema: pa.Schema) -> tuple[list[Run], pa.RecordBatch | None]:
    """The same again; ``schema`` is that of the rows made."""
    runs, made = _decode(data)
    return runs, pa.ipc.read_record_batch(pa.py_buffer(made), schema) if made else None
