"""Channels: FIFO pairs of subtasks with numbered rows, credit, barriers that may overtake, and blocking.

    OutputChannel ── builder ── waiting frames ──(credit)── send ──> put ── queue ── InputChannel.take
                                                   local: by reference   remote: a ``connections.Connection``

Both kinds of channel are the same two objects; only ``send`` and the way back of the credit differ.  A frame of rows or
a lone watermark costs one credit; a barrier or an end costs none.  So a receiver never holds more than
``capacity_frames`` of them, and a barrier is never held up by a receiver that does not take.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from cutwater.dataflow.graph import Channel
from cutwater.operators.base import MIN_WATERMARK
from cutwater.runtime.net_input import CONTROL, EMPTY, ROWS, URGENT, InputChannel
from cutwater.runtime.net_items import Barrier, End, Item, Rows, Timed, Watermark, nothing
from cutwater.runtime.net_output import OutputChannel
from cutwater.runtime.net_signal import Signal

__all__ = [
    "CONTROL",
    "EMPTY",
    "ROWS",
    "URGENT",
    "Barrier",
    "Channel",
    "End",
    "InputChannel",
    "Item",
    "OutputChannel",
    "Rows",
    "Signal",
    "Timed",
    "Watermark",
    "local_pair",
]


def local_pair(
    key: Channel,
    schema: pa.Schema,
    *,
    capacity_frames: int = 8,
    batch_rows: int = 65_536,
    buffer_timeout_ms: float = 2.0,
    on_input_ready: Callable[[], None] = nothing,
    on_output_ready: Callable[[], None] = nothing,
    next_row: int = 0,
    watermark: int = MIN_WATERMARK,
) -> tuple[OutputChannel, InputChannel]:
    """A channel within one process: batches go by reference.

    ``next_row`` and ``watermark`` start both ends; where a restored receiver stands elsewhere, make the two by hand.

    >>> import pyarrow as pa
    >>> batch = pa.record_batch({"k": [1, 2, 3]})
    >>> out, inp = local_pair(Channel(0, 0, 1), batch.schema)
    >>> out.offer(batch); out.flush(); inp.head() == ROWS
    True
    >>> inp.take(2).batch.num_rows, inp.next_row, inp.take(2).first_row
    (2, 2, 2)
    """
    inp = InputChannel(key, schema, capacity_frames, on_input_ready, next_row=next_row, watermark=watermark)
    out = OutputChannel(
        key,
        schema,
        inp.put,
        credit=capacity_frames,
        batch_rows=batch_rows,
        buffer_timeout_ms=buffer_timeout_ms,
        on_ready=on_output_ready,
        next_row=next_row,
        watermark=watermark,
    )
    inp.on_credit = out.grant
    return out, inp
