"""A dataflow at one parallelism, and a snapshot that was taken at another one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cutwater.config import RecoveryName
from cutwater.protocol.regions import Division
from cutwater.protocol.watermarks import InputTime
from cutwater.sim.graphs import Graph, key_of
from cutwater.sim.subtask_state import Part

if TYPE_CHECKING:
    from cutwater.sim.channels import Item

__all__ = ["Plan", "reroute", "rescaled"]


class Plan:
    """A dataflow at one parallelism, and what of it goes back after a failure.

    Args:
        parallelism: of the steps that can be rescaled; 0: what each began with.

    >>> from cutwater.sim.dataflows import WORLDS
    >>> [len(Plan(WORLDS["four"].at(p), p, "job").graph.tasks) for p in (0, 1, 3)]
    [4, 3, 7]
    """

    def __init__(self, graph: Graph, parallelism: int, recovery: RecoveryName) -> None:
        self.graph, self.parallelism = graph, parallelism
        self.recovery: RecoveryName = recovery
        self.divide(graph.divided(recovery))

    def divide(self, division: Division) -> None:
        """What goes back together, and what goes back with it (R1-R4)."""
        self.division = division
        self.region_of = [division.region_of[t] for t in self.graph.tasks]

    @property
    def everything(self) -> tuple[int, ...]:
        """All regions."""
        return tuple(range(len(self.division.regions)))


def rescaled(parts: Mapping[int, Part], old: Graph, new: Graph, rows: Mapping[int, list[Item]]) -> dict[int, Part]:
    """The parts of a snapshot at another parallelism; what is on its way lies in the receivers' parts.

    Keys go to their owners, a sink's staged rows to any of its subtasks; of time and end the least holds.  Rows of the
    channels are numbered anew.

    Args:
        rows: of each channel of ``new`` what is on its way.
    """
    made: dict[int, Part] = {}
    for task, (step, index) in enumerate(new.tasks):
        before = [parts[t] for t, (s, _) in enumerate(old.tasks) if s == step]
        mine = before[index :: new.steps[step].parallelism]
        part = made[task] = Part()
        part.task, part.attempt, part.files, part.handles = task, 0, [], []
        same = before[index] if task in new.sources else None
        part.position, part.exhausted = (same.position, same.exhausted) if same else (0, False)
        part.sign = sum(p.sign for p in before)
        part.counts = _counts(before, mine, task in new.sinks, index, new.steps[step].parallelism)
        part.pieces = tuple(piece for p in mine for piece in p.pieces)
        part.watermarks = min(p.watermarks for p in ([same] if same else before))
        part.combined = min(p.combined for p in before)
        part.has_ended = same.has_ended if same else all(p.has_ended for p in before)
        part.ended, part.merger = _inputs(parts, old, new, task)
        part.logs, part.overtaken = {c: rows.get(c, []) for c in new.inputs[task]}, {}
        part.ins = dict.fromkeys(new.inputs[task], 0)
        part.outs = {c: len(rows.get(c, [])) for c in new.outputs[task]}
        part.items, part.kept, part.choice = {}, {}, (0, 0)
    return made


def reroute(rows: Mapping[int, list[Item]], old: Graph, new: Graph) -> dict[int, list[Item]]:
    """What is on its way, by channel of ``old``, and by channel of ``new``: each row goes to the owner of its key."""
    channel_at = {(c.edge, new.tasks[c.source][1], new.tasks[c.target][1]): c.index for c in new.channels}
    found: defaultdict[int, list[Item]] = defaultdict(list)
    for channel, items in sorted(rows.items()):
        spec = old.channels[channel]
        edge = new.edges[spec.edge]
        sender = old.tasks[spec.source][1] % new.steps[edge.source].parallelism
        for item in items:
            if type(item) is int:  # time and end are told anew
                receiver = key_of(item) % new.steps[edge.target].parallelism if edge.how == "hash" else sender
                found[channel_at[spec.edge, sender, receiver]].append(item)
    return dict(found)


def _counts(before: list[Part], mine: list[Part], sink: bool, index: int, parallelism: int) -> dict[int, int]:
    found = Counter[int]()
    for part in mine if sink else before:
        found.update(part.counts)
    return {key: n for key, n in found.items() if sink or key % parallelism == index}


def _inputs(
    parts: Mapping[int, Part], old: Graph, new: Graph, task: int
) -> tuple[frozenset[int], dict[int, InputTime]]:
    """Which inputs have ended, and what time each has reached: what all old channels of the edge say."""
    ended, times = set[int](), dict[int, InputTime]()
    for channel in new.inputs[task]:
        spec = new.channels[channel]
        of_source = new.tasks[spec.source][1] if spec.source in new.sources else None
        known = [c for c in old.channels if c.edge == spec.edge and of_source in (None, old.tasks[c.source][1])]
        if all(c.index in parts[c.target].ended for c in known):
            ended.add(channel)
        times[channel] = InputTime(min(parts[c.target].merger[c.index].watermark for c in known))
    return frozenset(ended), times
