"""Kernels of the partitioner: a counting sort by target, stable within a target."""

from __future__ import annotations

from typing import Any

from cutwater.state.hashing import group_of, hash_word
from cutwater.state.kernels import kernel

__all__ = ["order", "places", "scatter", "targets_of_hashes", "targets_of_words"]


@kernel
def targets_of_words(words: Any, owners: Any, targets: Any, counts: Any) -> None:
    """Target of each row keyed by one word; ``owners`` maps each key group to its subtask."""
    groups = owners.shape[0]
    for i in range(words.shape[0]):
        target = owners[group_of(hash_word(words[i]), groups)]
        targets[i] = target
        counts[target] += 1


@kernel
def targets_of_hashes(hashes: Any, owners: Any, targets: Any, counts: Any) -> None:
    groups = owners.shape[0]
    for i in range(hashes.shape[0]):
        target = owners[group_of(hashes[i], groups)]
        targets[i] = target
        counts[target] += 1


@kernel
def places(targets: Any, starts: Any, out: Any) -> None:
    """Where each row goes, when the rows of target t go to ``starts[t]`` and after.  Moves ``starts``."""
    for i in range(targets.shape[0]):
        target = targets[i]
        place = starts[target]
        out[i] = place
        starts[target] = place + 1


@kernel
def order(targets: Any, starts: Any, out: Any) -> None:
    """The inverse of ``places``: which row comes to each place."""
    for i in range(targets.shape[0]):
        target = targets[i]
        place = starts[target]
        out[place] = i
        starts[target] = place + 1


@kernel
def scatter(values: Any, where: Any, out: Any) -> None:
    for i in range(values.shape[0]):
        out[where[i]] = values[i]
