"""Kernels of the partitioner: a counting sort by target, stable within a target.

A counter that two neighbouring rows share makes the second wait for the first.  So counting and placing walk through
``LANES`` equal stretches of the batch at once, each with counters of its own: twice as fast, whatever the targets are.
Hashes are computed in blocks and apart from the look-up of their owner: without it the compiler makes vector code.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cutwater.state.kernels import copy_bytes, group_of, hash_word, kernel, load_u64, set_word

LANES = 4
_BLOCK_ROWS = 256


@kernel
def targets_of_words(words: Any, owners: Any, targets: Any) -> None:
    """Target of each row keyed by one word; ``owners`` maps each key group to its subtask."""
    groups = np.uint64(owners.shape[0])
    found = np.empty(_BLOCK_ROWS, np.uint64)
    for begin in range(0, words.shape[0], _BLOCK_ROWS):
        first, rows = np.uint64(begin), np.uint64(min(_BLOCK_ROWS, words.shape[0] - begin))
        for i in range(rows):
            found[i] = np.uint64(group_of(hash_word(words[first + i]), groups))
        for i in range(rows):
            targets[first + i] = owners[found[i]]


@kernel
def targets_of_hashes(hashes: Any, owners: Any, targets: Any) -> None:
    groups = owners.shape[0]
    for i in range(np.uint64(hashes.shape[0])):
        targets[i] = owners[np.uint64(group_of(hashes[i], groups))]


@kernel
def targets_of_places(places: Any, values: Any, targets: Any) -> None:
    """Target of each row by its value; ``values`` has one for each value of a dictionary."""
    for i in range(np.uint64(places.shape[0])):
        targets[i] = values[np.uint64(places[i])]


@kernel
def count(targets: Any, counts: Any) -> None:
    """Rows of each target, by lane: ``counts[lane, target]``."""
    stretch = np.uint64(targets.shape[0] // LANES)
    for i in range(stretch):
        for lane in range(np.uint64(LANES)):
            counts[lane, np.uint64(targets[lane * stretch + i])] += 1
    for i in range(stretch * np.uint64(LANES), np.uint64(targets.shape[0])):
        counts[LANES - 1, np.uint64(targets[i])] += 1


@kernel
def order_of_few(targets: Any, ends: Any, out: Any) -> None:
    """Rows ordered by target, in one lane: those of target t go to ``ends[t]`` up to ``ends[t + 1]``.

    ``ends`` has one place more than there are targets, all zero.
    """
    for i in range(np.uint64(targets.shape[0])):
        ends[np.uint64(targets[i] + 1)] += 1
    for t in range(1, ends.shape[0]):
        ends[t] += ends[t - 1]
    for i in range(targets.shape[0] - 1, -1, -1):  # from the last row on: ``ends`` falls to where its target begins
        target = np.uint64(targets[i] + 1)
        ends[target] -= 1
        out[np.uint64(ends[target])] = i
    for t in range(1, ends.shape[0] - 1):
        ends[t] = ends[t + 1]
    ends[ends.shape[0] - 1] = targets.shape[0]


@kernel
def places(targets: Any, starts: Any, out: Any) -> None:
    """Where each row goes, when the rows of a lane and target go to ``starts[lane, target]`` and after.

    Moves ``starts``.
    """
    stretch = np.uint64(targets.shape[0] // LANES)
    for i in range(stretch):
        for lane in range(np.uint64(LANES)):
            row = lane * stretch + i
            target = np.uint64(targets[row])
            place = starts[lane, target]
            out[row] = place
            starts[lane, target] = place + 1
    for row in range(stretch * np.uint64(LANES), np.uint64(targets.shape[0])):
        target = np.uint64(targets[row])
        place = starts[LANES - 1, target]
        out[row] = place
        starts[LANES - 1, target] = place + 1


@kernel
def order(where: Any, out: Any) -> None:
    """The inverse of ``where``, a permutation: which row comes to each place."""
    for i in range(np.uint64(where.shape[0])):
        out[np.uint64(where[i])] = i


@kernel
def scatter(values: Any, where: Any, out: Any) -> None:
    for i in range(np.uint64(values.shape[0])):
        out[np.uint64(where[i])] = values[i]


OVERRUN_BYTES = 16
"""``take_texts`` may write so many bytes too far."""


@kernel
def place_texts(offsets: Any, order: Any, places: Any) -> Any:
    """Where each text of the rows in ``order`` begins, one behind the other, and as the last one where all end.

    Returns that.
    """
    at = np.int64(0)
    for i in range(order.shape[0]):
        places[i] = at
        at += np.int64(offsets[order[i] + 1]) - np.int64(offsets[order[i]])
    places[order.shape[0]] = at
    return at


@kernel
def take_texts(data: Any, offsets: Any, order: Any, source: Any, target: Any, places: Any) -> None:
    """The texts of the rows in ``order`` at their places, a short one as two words whatever its length.

    Args:
        source, target: addresses of ``data`` and of the memory to write to.
        places: what ``place_texts`` found.
    """
    safe = np.int64(data.shape[0]) - OVERRUN_BYTES
    for i in range(order.shape[0]):
        row = order[i]
        start = np.int64(offsets[row])
        length = np.int64(offsets[row + 1]) - start
        at = np.int64(places[i])
        if length <= OVERRUN_BYTES and start <= safe:
            set_word(target + at, load_u64(data, start))
            set_word(target + at + 8, load_u64(data, start + 8))
        else:
            copy_bytes(target + at, source + start, length)
