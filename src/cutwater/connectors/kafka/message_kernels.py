"""Messages of librdkafka, structs in its memory, to columns.  No object is made for a message.

A message is a C struct (``rd_kafka_message_t``, part of the library's stable interface) of 72 bytes: at 0 an error
(four bytes), at 24 the address of its value and at 32 the length, at 40 and 48 those of its key, at 56 its offset.  An
address of 0 is null.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from cutwater.state.kernels import byte_at, copy_bytes, kernel, set_byte, word_at

VALUE, KEY = 24, 40
"""Where in a message the address of its value and of its key is; the length comes behind."""
_OFFSET = 56
_ERROR = np.uint64(0xFFFFFFFF)
_NEWLINE, _SPACE = 10, 32
_US_PER_MS = 1000


def _call_destroy(context: Any, function: Any, message: Any) -> Any:
    """``function(message)``, both addresses: ``rd_kafka_message_destroy``."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte]).as_pointer()
        builder.call(builder.inttoptr(arguments[0], kind), [builder.inttoptr(arguments[1], byte)])
        return target.get_dummy_value()

    return types.void(types.intp, types.intp), generate


def _call_timestamp(context: Any, function: Any, message: Any, kind_at: Any) -> Any:
    """``function(message, &kind)``, all addresses: ``rd_kafka_message_timestamp``, in milliseconds."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.IntType(64), [byte, byte]).as_pointer()
        places = [builder.inttoptr(place, byte) for place in arguments[1:]]
        return builder.call(builder.inttoptr(arguments[0], kind), places)

    return types.int64(types.intp, types.intp, types.intp), generate


_destroy: Any = intrinsic(_call_destroy)
_timestamp: Any = intrinsic(_call_timestamp)


@kernel
def measure(messages: Any, first: Any, stop: Any, sizes: Any) -> Any:
    """The end of the messages from ``first`` on that are rows and no events; ``sizes``: bytes of values, of keys."""
    values = keys = np.int64(0)
    end = stop
    for i in range(first, stop):
        message = messages[i]
        if word_at(message) & _ERROR:
            end = i
            break
        values += np.int64(word_at(message + 32))
        keys += np.int64(word_at(message + 48))
    sizes[0], sizes[1] = values, keys
    return end


@kernel
def gather(
    messages: Any, first: Any, stop: Any, where: Any, gap: Any, out: Any, starts: Any, ends: Any, valid: Any
) -> Any:
    """Values or keys one behind the other.

    Args:
        where: ``VALUE`` or ``KEY``.
        gap: 1 to write a newline behind each that is not null, and to make newlines in them spaces; else 0.
        out: address to write at.
        starts, ends: where each begins and ends in ``out``, without the newline.
        valid: 0 for null.

    Returns:
        How many are null.
    """
    at = np.int64(0)
    nulls = 0
    for i in range(first, stop):
        message = messages[i]
        source = np.int64(word_at(message + where))
        length = np.int64(word_at(message + where + 8))
        valid[i - first] = source != 0
        starts[i - first] = at
        if source == 0:
            nulls += 1
            ends[i - first] = at
            continue
        if gap == 0:
            copy_bytes(out + at, source, length)
            at += length
            ends[i - first] = at
            continue
        for j in range(length):
            byte = byte_at(source + j)
            set_byte(out + at + j, _SPACE if byte == _NEWLINE else byte)
        at += length
        ends[i - first] = at
        set_byte(out + at, _NEWLINE)
        at += 1
    return nulls


@kernel
def places(messages: Any, first: Any, stop: Any, offsets: Any) -> None:
    """The offset of each message in its partition."""
    for i in range(first, stop):
        offsets[i - first] = np.int64(word_at(messages[i] + _OFFSET))


@kernel
def stamps(messages: Any, first: Any, stop: Any, function: Any, kind_at: Any, out: Any) -> Any:
    """When each message was made, in microseconds; the smallest number there is where it does not say.

    Returns:
        How many do not say.
    """
    missing = 0
    for i in range(first, stop):
        ms = _timestamp(function, messages[i], kind_at)
        missing += ms < 0
        out[i - first] = ms * _US_PER_MS
    return missing


@kernel
def destroy(messages: Any, first: Any, stop: Any, function: Any) -> None:
    """Give the messages back to the library."""
    for i in range(first, stop):
        _destroy(function, messages[i])
