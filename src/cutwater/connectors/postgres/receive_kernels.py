"""Takes messages out of libpq (``PQgetCopyData``) without an object for each."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from cutwater.state.kernels import copy_bytes, kernel, word_at

COUNT, SIZE, HELD, LENGTH, LAST = 0, 1, 2, 3, 4
"""Places in the state of ``drain``."""


def _call_get(context: Any, function: Any, connection: Any, place: Any) -> Any:
    """``function(connection, place, 1)``, all addresses: ``PQgetCopyData``, which does not wait."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(number, [byte, byte, number]).as_pointer()
        places = [builder.inttoptr(address, byte) for address in arguments[1:]]
        found = builder.call(builder.inttoptr(arguments[0], kind), [*places, number(1)])
        return builder.sext(found, ir.IntType(64))

    return types.int64(types.intp, types.intp, types.intp), generate


def _call_free(context: Any, function: Any, memory: Any) -> Any:
    """``function(memory)``, both addresses: ``PQfreemem``."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte]).as_pointer()
        builder.call(builder.inttoptr(arguments[0], kind), [builder.inttoptr(arguments[1], byte)])
        return target.get_dummy_value()

    return types.void(types.intp, types.intp), generate


_get: Any = intrinsic(_call_get)
_free: Any = intrinsic(_call_free)


@kernel
def drain(
    connection: Any, get: Any, free: Any, place: Any, out: Any, capacity: Any, starts: Any, most: Any, state: Any
) -> None:
    """Copy messages that libpq has, one behind the other.

    Args:
        connection, get, free: addresses: of the connection, and of the two functions.
        place: address of a word for libpq to write an address into.
        out, capacity: where to copy to.
        starts: where each message begins, with room for one more than ``most``.
        state: how many messages, how many bytes; address and length of a message that did not fit any more (0: none),
            which comes first at the next call; what libpq said last (0: no more for now, -1: the end, -2: an error).
    """
    count = size = np.int64(0)
    state[LAST] = 1
    while count < most:
        if state[HELD] == 0:
            state[LAST] = _get(get, connection, place)
            if state[LAST] <= 0:
                break
            state[HELD], state[LENGTH] = np.int64(word_at(place)), state[LAST]
        if size + state[LENGTH] > capacity:
            break
        copy_bytes(out + size, state[HELD], state[LENGTH])
        _free(free, state[HELD])
        starts[count] = size
        size += state[LENGTH]
        count += 1
        state[HELD] = 0
    starts[count] = size
    state[COUNT], state[SIZE] = count, size


@kernel
def release(free: Any, state: Any) -> None:
    """Give back a message that was not copied."""
    if state[HELD] != 0:
        _free(free, state[HELD])
        state[HELD] = 0
