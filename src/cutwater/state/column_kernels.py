"""Kernels under columns: setting chunks aside before they change, marking changed group ids, and rows as bytes.

A chunk of a captured column is *waiting*, being *copied* or *done*.  The thread that changes rows and the one that
writes the snapshot both copy chunks; whoever moves one from waiting to copied has it, the other waits for a moment.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cutwater.state.kernels import compare_exchange, copy_bytes, kernel, load_acquire, store_release

CHUNK_ROWS = 128
"""Rows of a chunk.  Small, because random keys touch nearly all chunks, and the stream waits for every copy."""
_SHIFT = 7
_PAGE_BYTES = 4096

DONE = 0
WAITING = 1
_COPYING = 2


@kernel
def capture_chunk(chunk: Any, pending: Any, sources: Any, targets: Any, widths: Any) -> None:
    while load_acquire(pending, chunk) != DONE:
        if compare_exchange(pending, chunk, WAITING, _COPYING):
            for c in range(widths.shape[0]):
                at = chunk * widths[c]
                copy_bytes(targets[c] + at, sources[c] + at, widths[c])
            store_release(pending, chunk, DONE)


@kernel
def preserve(gids: Any, pending: Any, sources: Any, targets: Any, widths: Any) -> None:
    """Copy the chunks of these group ids that nobody has copied yet: their rows are about to change.

    Args:
        gids: rows; those beyond the captured ones need no copy.
        pending: state by chunk.
        sources, targets: addresses of the columns and of their copies.
        widths: bytes of a chunk, by column.
    """
    for i in range(gids.shape[0]):
        chunk = np.int64(gids[i]) >> _SHIFT
        if chunk < pending.shape[0]:
            capture_chunk(chunk, pending, sources, targets, widths)


@kernel
def capture_chunks(pending: Any, first: Any, last: Any, sources: Any, targets: Any, widths: Any) -> None:
    """Copy all chunks ``first`` .. ``last`` - 1 that nobody has copied yet."""
    for chunk in range(first, last):
        capture_chunk(chunk, pending, sources, targets, widths)


@kernel
def mark(gids: Any, bits: Any) -> None:
    """Set the bit of every group id."""
    for i in range(gids.shape[0]):
        gid = gids[i]
        bits[gid >> 3] |= np.uint8(1 << (gid & 7))


@kernel
def set_new(gids: Any, known: Any, values: Any, column: Any) -> None:
    """Set the value of each group id from ``known`` on, by row."""
    for i in range(gids.shape[0]):
        if gids[i] >= known:
            column[gids[i]] = values[i]


@kernel
def in_a_row(gids: Any) -> Any:
    """True if each group id is the one after that before it."""
    gaps = 0
    for i in range(1, gids.shape[0]):
        gaps |= gids[i] - gids[i - 1] - 1
    return gaps == 0


@kernel
def count_marked(bits: Any) -> Any:
    """Number of bits that are set."""
    count = 0
    for byte in range(bits.shape[0]):
        rest = np.int64(bits[byte])
        rest -= (rest >> 1) & 0x55
        rest = (rest & 0x33) + ((rest >> 2) & 0x33)
        count += (rest + (rest >> 4)) & 0x0F
    return count


@kernel
def marked(bits: Any, out: Any) -> Any:
    """The group ids whose bit is set, ascending, into ``out``; returns how many."""
    count = 0
    for byte in range(bits.shape[0]):
        rest = bits[byte]
        if rest == 0:
            continue
        for bit in range(8):
            if rest & np.uint8(1 << bit):
                out[count] = 8 * byte + bit
                count += 1
    return count


@kernel
def order_by_group(groups: Any, starts: Any, order: Any) -> None:
    """The places of the rows in ascending group, those of a group in their order, into ``order``.

    Args:
        starts: zeros, one more than there are groups.
    """
    for i in range(groups.shape[0]):
        starts[np.int64(groups[i]) + 1] += 1
    for group in range(1, starts.shape[0]):
        starts[group] += starts[group - 1]
    for i in range(groups.shape[0]):
        group = np.int64(groups[i])
        order[starts[group]] = i
        starts[group] += 1


@kernel
def gather_rows(source: Any, stride: Any, rows: Any, gids: Any, target: Any, width: Any) -> Any:
    """Copy the rows of these group ids one behind the other; nothing, and ``False``, if one of them is not there.

    Args:
        source: address of the column.
        stride: bytes from one of its rows to the next.
        target: address of as many rows as there are group ids.
        width: bytes of a row.
    """
    lowest, highest = np.int32(0), np.int32(0)
    for i in range(gids.shape[0]):
        lowest, highest = min(lowest, gids[i]), max(highest, gids[i])
    if lowest < 0 or highest >= rows:
        return False
    if width == 8:  # a constant makes the copy an instruction
        for i in range(gids.shape[0]):
            copy_bytes(target + 8 * i, source + np.int64(gids[i]) * stride, 8)
    else:
        for i in range(gids.shape[0]):
            copy_bytes(target + width * i, source + np.int64(gids[i]) * stride, width)
    return True


@kernel
def touch_pages(content: Any, first: Any, last: Any) -> None:
    """Write to every page between two positions without changing anything: zero becomes zero."""
    for at in range(first, last, _PAGE_BYTES):
        compare_exchange(content, at, 0, 0)


@kernel
def join_spans(data: Any, offsets: Any, cursors: Any, out: Any) -> None:
    """Append each row's bytes to ``out`` at the row's cursor, and move the cursor."""
    for i in range(cursors.shape[0]):
        start = np.int64(offsets[i])
        length = np.int64(offsets[i + 1]) - start
        at = cursors[i]
        for b in range(length):
            out[at + b] = data[start + b]
        cursors[i] = at + length


@kernel
def row_starts(data: Any, offsets: Any, width: Any, lengths: Any, starts: Any, counts: Any) -> Any:
    """Find the beginnings of the rows that lie one behind the other in each value; returns their number.

    A row has ``width`` bytes, and behind them as many as the four bytes at each of ``lengths`` in it say.
    """
    rows = 0
    for i in range(counts.shape[0]):
        at = np.int64(offsets[i])
        first = rows
        while at < offsets[i + 1]:
            starts[rows] = at
            rows += 1
            size = np.int64(width)
            for k in range(lengths.shape[0]):
                place = at + lengths[k]
                for b in range(4):
                    size += np.int64(data[place + b]) << (8 * b)
            at += size
        counts[i] = rows - first
    return rows
