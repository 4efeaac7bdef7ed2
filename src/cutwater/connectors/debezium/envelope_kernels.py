"""Kernels over Debezium's messages: where in their JSON the parts lie, and the bytes of decimals."""

from __future__ import annotations

from typing import Any

import numpy as np

from cutwater.connectors.messages.byte_kernels import big_endian
from cutwater.state.kernels import byte_at, copy_bytes, kernel, set_byte, set_word, trailing_zeros, word_at

BEFORE, AFTER, SOURCE, OP, DDL, SCHEMA, PAYLOAD = range(7)
PARTS = 7
"""Of a message, for each of which its place is noted: where it begins, and where it ends."""
GOOD, TOMBSTONE, NO_OBJECT = 0, 1, 2
"""What a message is."""

_QUOTE, _BACKSLASH, _COMMA, _COLON = 34, 92, 44, 58
_OPEN, _CLOSE, _OPEN_LIST, _CLOSE_LIST = 123, 125, 91, 93
_ONES, _HIGHS = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
_QUOTES, _BACKSLASHES = np.uint64(0x2222222222222222), np.uint64(0x5C5C5C5C5C5C5C5C)
_NAMES = tuple(
    np.uint64(int.from_bytes(name, "little"))
    for name in (b"before", b"after", b"source", b"op", b"ddl", b"schema", b"payload")
)
_LONGEST_NAME = 7


@kernel
def _blank(at: Any, end: Any) -> Any:
    """The next byte that is no white space."""
    while at < end and (byte_at(at) == 32 or (byte_at(at) >= 9 and byte_at(at) <= 13)):
        at += 1
    return at


@kernel
def _string(at: Any, end: Any) -> Any:
    """The byte behind a string, whose opening quote is behind us; -1: it does not end."""
    while at < end:
        if at + 8 <= end:
            word = word_at(at)
            quotes, slashes = word ^ _QUOTES, word ^ _BACKSLASHES
            hits = ((quotes - _ONES) & ~quotes | (slashes - _ONES) & ~slashes) & _HIGHS
            if hits == np.uint64(0):
                at += 8
                continue
            at += np.int64(trailing_zeros(hits)) >> 3
        if byte_at(at) == _QUOTE:
            return at + 1
        at += 2 if byte_at(at) == _BACKSLASH else 1
    return np.int64(-1)


@kernel
def _value(at: Any, end: Any) -> Any:
    """The byte behind a value; -1: it does not end.  What is in objects and lists is not looked at."""
    if at >= end:
        return np.int64(-1)
    first = byte_at(at)
    if first == _QUOTE:
        return _string(at + 1, end)
    if first != _OPEN and first != _OPEN_LIST:
        begin = at
        while at < end:
            one = byte_at(at)
            if one in (_COMMA, _CLOSE, _CLOSE_LIST) or one <= 32:
                break
            at += 1
        return at if at > begin else np.int64(-1)
    depth = 0
    while at < end:
        one = byte_at(at)
        if one == _QUOTE:
            at = _string(at + 1, end)
            if at < 0:
                return at
            continue
        if one in (_OPEN, _OPEN_LIST):
            depth += 1
        elif one in (_CLOSE, _CLOSE_LIST):
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return np.int64(-1)


@kernel
def _part(at: Any, length: Any) -> Any:
    """Which part has a name; -1: none."""
    if length > _LONGEST_NAME:
        return -1
    word = np.uint64(0)
    for i in range(length):
        word |= np.uint64(byte_at(at + i)) << np.uint64(8 * i)
    for part in range(PARTS):
        if word == _NAMES[part]:
            return part
    return -1


@kernel
def _object(at: Any, end: Any, data: Any, row: Any, places: Any) -> Any:
    """Note where the parts of an object lie, nulls not: whether it is one."""
    at = _blank(at, end)
    if at >= end or byte_at(at) != _OPEN:
        return False
    at = _blank(at + 1, end)
    if at < end and byte_at(at) == _CLOSE:
        return _blank(at + 1, end) == end
    while at < end and byte_at(at) == _QUOTE:
        name = at + 1
        behind = _string(name, end)
        if behind < 0:
            return False
        at = _blank(behind, end)
        if at >= end or byte_at(at) != _COLON:
            return False
        begin = _blank(at + 1, end)
        at = _value(begin, end)
        if at < 0:
            return False
        part = _part(name, behind - 1 - name)
        if part >= 0:
            null = at - begin == 4 and byte_at(begin) == 110
            places[row, 2 * part] = -1 if null else begin - data
            places[row, 2 * part + 1] = at - data
        at = _blank(at, end)
        if at >= end:
            return False
        if byte_at(at) == _CLOSE:
            return _blank(at + 1, end) == end
        if byte_at(at) != _COMMA:
            return False
        at = _blank(at + 1, end)
    return False


@kernel
def _same(one: Any, other: Any, length: Any) -> Any:
    i = 0
    while i + 8 <= length:
        if word_at(one + i) != word_at(other + i):
            return False
        i += 8
    while i < length:
        if byte_at(one + i) != byte_at(other + i):
            return False
        i += 1
    return True


@kernel
def scan(data: Any, starts: Any, ends: Any, valid: Any, kinds: Any, ops: Any, places: Any, runs: Any) -> None:
    """What each message is, and where its parts lie.

    Args:
        data: address of the messages; ``starts`` and ``ends`` are places behind it.
        kinds: gets ``GOOD`` and so on.
        ops: gets the letter of the operation; 0: there is none.
        places: gets begin and end of each part behind ``data``, -1 for what is missing or null.
        runs: gets the number of the run of messages with the same schema in front that a good one is in.
    """
    run, last = -1, -1
    for row in range(starts.shape[0]):
        ops[row], runs[row] = 0, -1
        for part in range(2 * PARTS):
            places[row, part] = -1
        if not valid[row]:
            kinds[row] = TOMBSTONE
            continue
        kinds[row] = NO_OBJECT
        if not _object(data + starts[row], data + ends[row], data, row, places):
            continue
        schema, schema_end = places[row, 2 * SCHEMA], places[row, 2 * SCHEMA + 1]
        payload, payload_end = places[row, 2 * PAYLOAD], places[row, 2 * PAYLOAD + 1]
        if places[row, 2 * OP] < 0 and payload_end >= 0:
            if payload < 0:
                kinds[row] = TOMBSTONE
                continue
            if not _object(data + payload, data + payload_end, data, row, places):
                continue
        else:
            schema = schema_end = -1
        kinds[row] = GOOD
        places[row, 2 * SCHEMA], places[row, 2 * SCHEMA + 1] = schema, schema_end
        op = places[row, 2 * OP]
        if op >= 0 and places[row, 2 * OP + 1] - op == 3 and byte_at(data + op) == _QUOTE:
            ops[row] = byte_at(data + op + 1)
        same = last >= 0 and _as_before(data, row, last, schema, schema_end, places)
        if not same:
            run += 1
        runs[row], last = run, row


@kernel
def _as_before(data: Any, row: Any, last: Any, schema: Any, schema_end: Any, places: Any) -> Any:
    before, before_end = places[last, 2 * SCHEMA], places[last, 2 * SCHEMA + 1]
    if schema < 0 or before < 0:
        return schema < 0 and before < 0
    return schema_end - schema == before_end - before and _same(data + schema, data + before, schema_end - schema)


@kernel
def gather(data: Any, begins: Any, lengths: Any, out: Any, starts: Any) -> None:
    """Copy pieces of memory to where they are to begin, a newline behind each."""
    for i in range(begins.shape[0]):
        copy_bytes(out + starts[i], data + begins[i], lengths[i])
        set_byte(out + starts[i] + lengths[i], 10)


# ------------------------------------------------------------------------------------------------------- decimals


@kernel
def _six_bits(letter: Any) -> Any:
    """What a letter of Base64 stands for; -1: it is none."""
    if letter >= 65 and letter <= 90:
        return letter - 65
    if letter >= 97 and letter <= 122:
        return letter - 71
    if letter >= 48 and letter <= 57:
        return letter + 4
    return 62 if letter == 43 else 63 if letter == 47 else -1


@kernel
def base64_bytes(data: Any, ends: Any, out: Any, out_ends: Any, bad: Any) -> None:
    """Texts of Base64 as bytes, one behind the other.

    Args:
        data: address of the texts; ``ends`` their offsets.
        out: address of room for as many bytes; ``out_ends`` gets the offsets.
        bad: gets whether a text is none.
    """
    to = np.int64(0)
    out_ends[0] = 0
    for row in range(ends.shape[0] - 1):
        at, end = np.int64(ends[row]), np.int64(ends[row + 1])
        size = end - at
        while end > at and byte_at(data + end - 1) == 61 and size - (end - at) < 2:
            end -= 1
        bad[row] = size % 4 != 0 or (end - at) % 4 == 1
        word = count = 0
        while at < end and not bad[row]:
            bits = _six_bits(byte_at(data + at))
            bad[row] = bits < 0
            word = word << 6 | bits & 63
            count += 6
            if count >= 8:
                count -= 8
                set_byte(out + to, word >> count & 255)
                to += 1
            at += 1
        out_ends[row + 1] = to


@kernel
def decimals(data: Any, ends: Any, most_high: Any, most_low: Any, out: Any, bad: Any) -> None:
    """Big-endian numbers as the words of decimals.

    Args:
        data: address of the bytes; ``ends`` their offsets.
        most_high, most_low: words of the largest number.
        out: address of sixteen bytes for each.
        bad: gets whether it is larger, or none.
    """
    for row in range(ends.shape[0] - 1):
        begin = np.int64(ends[row])
        good, high, low = big_endian(data + begin, np.int64(ends[row + 1]) - begin, most_high, most_low)
        bad[row] = not good
        set_word(out + 16 * row, low if good else np.uint64(0))
        set_word(out + 16 * row + 8, high if good else np.uint64(0))
