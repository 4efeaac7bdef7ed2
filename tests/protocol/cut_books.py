"""The cut world's own books and what it checks with them, never asking the machines."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from cut_graphs import Channel, Graph, Task
from cut_links import Barrier, Link, Violation, plain, rows_of

from cutwater.protocol import messages as m


class Books:
    """What was sent, taken, frozen, logged, acknowledged and committed."""

    def __init__(self, graph: Graph, exactly: bool) -> None:
        self.graph, self.exactly = graph, exactly
        self.links = {c: Link(feedback=c in graph.back_edges) for c in graph.channels}
        self.emitted: list[int] = []
        self.cuts: dict[int, dict[Task, dict[Any, int]]] = defaultdict(dict)
        self.probes: set[int] = set()
        self.logs: dict[tuple[int, Channel], list[int]] = defaultdict(list)
        """Rows of an input's log, as the receiver keeps them."""
        self.overtaken: dict[tuple[int, Channel], list[int]] = defaultdict(list)
        """Rows overtaken at the sender."""
        self.undurable: dict[tuple[Task, int], set[str]] = defaultdict(set)
        self.unsettled: dict[tuple[Task, int], type] = {}
        """Who does not know yet what its barriers overtake in the outputs, and the event that will tell."""
        self.blocked: dict[Task, list[Channel]] = defaultdict(list)
        self.acked: dict[int, set[Task]] = defaultdict(set)
        self.told_aborted: set[tuple[Task, int]] = set()
        self.published: set[int] = set()
        self.uncommitted: dict[Task, list[int]] = defaultdict(list)
        self.pre_commits: dict[Task, dict[int, list[int]]] = defaultdict(dict)
        self.committed: list[int] = []
        self.seen: Counter[str] = Counter()

    # ------------------------------------------------------------------------------------------------------ entries

    def freeze(self, task: Task, id: int, probe: bool) -> None:
        if (task, id) in self.told_aborted:
            raise Violation(f"{task} freezes for {id} after the abort notice (A8)")
        if task in self.cuts[id]:
            raise Violation(f"{task} freezes twice for {id}")
        books: dict[Any, int] = {c: len(self.links[c].sent) for c in self.graph.outputs(task)}
        self.cuts[id][task] = books | {("in", c): len(self.links[c].taken) for c in self.graph.inputs(task)}
        self.undurable[task, id].add("state")
        if probe:
            self.probes.add(id)
            return
        self.pre_commits[task][id], self.uncommitted[task] = self.uncommitted[task], []

    def commit(self, task: Task, id: int) -> None:
        if id not in self.published:
            raise Violation(f"{task} commits {id}, which is not published")
        for older in [n for n in self.pre_commits[task] if n <= id]:
            self.committed += self.pre_commits[task].pop(older)
            self.seen["commits of an older id"] += older < id

    # ------------------------------------------------------------------------------------------------------- oracle

    def check_order(self, effects: list[m.Effect]) -> None:
        """A4, C3: freeze, then broadcast, then unblock."""
        rank = {m.Freeze: 0, m.BroadcastBarrier: 1, m.StartRecording: 2, m.Unblock: 3}
        order = [rank[type(e)] for e in effects if type(e) in rank]
        skipped = any(isinstance(e, m.Decline) for e in effects)  # an older id is given up first, and unblocks
        order = order[order.index(0) :] if skipped and 0 in order else order
        if 0 in order and order != sorted(order):
            raise Violation(f"effects out of order: {effects}")

    def check_cut(self, id: int) -> None:
        """CL6: what was sent before the sender's cut was taken before the receiver's, or is the channel's state."""
        cut = self.cuts[id]
        if set(cut) != set(self.graph.tasks):
            raise Violation(f"checkpoint {id} lacks {set(self.graph.tasks) - set(cut)}")
        for channel in self.graph.channels:
            before, sent_rows, taken_rows = self.sides(id, channel)
            if any(isinstance(item, Barrier) and item.id == id for item in before):
                raise Violation(f"{channel}: barrier {id} lies before the sender's cut (A2)")
            got_rows = taken_rows + self.logs[id, channel] + self.overtaken[id, channel]
            doubled = len(got_rows) - len(sent_rows)
            if got_rows[: len(sent_rows)] != sent_rows or (self.exactly and doubled):
                raise Violation(f"{channel}: cut {id} has {got_rows} of {sent_rows}")
            self.seen["doubled"] += doubled
            self.seen["overtaken at the sender"] += len(self.overtaken[id, channel])

    def check_quiet(self, id: int, loop: frozenset[Task]) -> None:
        """C6: no row and no watermark was on its way inside the loop."""
        for channel in self.graph.channels:
            if channel[0] in loop and channel[1] in loop and self.exactly:
                cut, link = self.cuts[id], self.links[channel]
                sent = plain(link.sent[: cut[channel[0]][channel]])
                taken = plain(link.taken[: cut[channel[1]]["in", channel]])
                if sent != taken:
                    raise Violation(f"wave {id} calls a loop quiet, but {channel} holds {sent[len(taken) :]}")

    def sides(self, id: int, channel: Channel) -> tuple[list[Any], list[int], list[int]]:
        """What was sent before the sender's cut, the rows in it, the rows taken before the receiver's."""
        cut, link = self.cuts[id], self.links[channel]
        before = link.sent[: cut[channel[0]][channel]]
        return before, rows_of(before), rows_of(link.taken[: cut[channel[1]]["in", channel]])

    def check_all_committed(self) -> None:
        kept = [
            r for t in self.graph.tasks for rows in (self.uncommitted[t], *self.pre_commits[t].values()) for r in rows
        ]
        if kept or sorted(self.committed) != sorted(self.emitted):
            raise Violation(f"{len(self.committed)} rows committed and {len(kept)} kept of {len(self.emitted)}")
