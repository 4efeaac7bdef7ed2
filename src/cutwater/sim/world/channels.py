"""Simulated network: FIFO channels with credits between subtasks, FIFO pipes for control messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from cutwater.data.time import MIN_WATERMARK

if TYPE_CHECKING:
    from cutwater.sim.schedules.graphs import Channel
    from cutwater.sim.world.subtask import SimSubtask
    from cutwater.sim.world.subtask_state import Part
    from cutwater.sim.world.world import World

BARRIER, WATERMARK, END = "barrier", "watermark", "end"

Item: TypeAlias = "int | tuple[Any, ...]"
"""A row, or (BARRIER, id, final, probe, position, savepoint), (WATERMARK, time), (END,)."""

CREDIT = 6
"""Rows that wait at the receiver at most; a back-edge has no limit (C7)."""
SENDER_FULL = 4
"""Rows without credit at which a sender counts as full."""
PER_DELIVERY = 4


class Link:
    """One channel of one attempt.  Rows wait at the sender until there is credit; a barrier may overtake them there.

    Rows are numbered from the job's first attempt on: ``history[k - base]`` is row ``k`` of the channel, as it was
    really sent.  After a restore ``log`` is what the snapshot says to be on its way, ``on_its_way`` what really was.
    """

    __slots__ = (
        "_came", "_end_came", "_ended", "_pumping", "_took", "again", "back", "base", "before", "clogs", "dead",
        "heard", "history", "index", "items", "keeps", "keeps_output", "kept", "log_items", "overtaken", "queue",
        "receiver", "rows_in", "rows_out", "said", "sender", "sent", "serial", "taken", "urgent", "waiting", "world",
    )  # fmt: skip

    def __init__(
        self, world: World, spec: Channel, taken: int, sent: int, log: list[Item], on_its_way: list[int]
    ) -> None:
        self.world, self.index, self.back = world, spec.index, spec.back
        self.base = self.taken = min(taken, sent)
        self.sent = sent
        self.history = on_its_way
        self.waiting: deque[Item] = deque()
        """At the sender."""
        self.queue: deque[Item] = deque(log)
        """At the receiver."""
        self.urgent: deque[tuple[tuple[Any, ...], int]] = deque()
        """At the receiver: barriers that overtook, with the number of the next item that they were ahead of."""
        self.rows_out, self.rows_in = 0, sum(type(item) is int for item in log)
        self.clogs = 0
        self.dead = False
        self.said = self.heard = MIN_WATERMARK
        """The last watermark sent, and the last one taken."""
        self._ended = self._end_came = False
        """The sender has said its end; it has come.  Ends come again after a restore, and count once."""
        self._pumping = False
        self._came, self._took = len(log), 0
        self.sender: SimSubtask | None = None
        self.receiver: SimSubtask | None = None
        self.keeps, self.keeps_output = world.keeps_order, world.keeps_output
        self.kept: list[Item] = list(log)
        """R4: all rows and watermarks that were sent, from the beginning of the channel's ``serial`` on."""
        self.log_items = len(log)
        self.items = 0
        """How much of that was taken."""
        self.serial = world.next_serial()
        self.before: Link | None = None
        """The channel that this one goes on for, until whoever survived has taken it over."""
        self.again = 0
        """Items that come again, and that the receiver has."""
        self.overtaken: list[Item] = []
        """The end of what the sender's part holds, for a receiver that does not have it."""

    # ------------------------------------------------------------------------------------------- one end went back

    @classmethod
    def after_sender(cls, spec: Channel, old: Link, part: Part | None) -> Link:
        """The receiver lives; the sender sends again from its part of the checkpoint on."""
        link = cls(old.world, spec, 0, part.outs[spec.index] if part else 0, [], [])
        link.before, link.serial, link.log_items = old, old.serial, old.log_items
        link.again = -old.mark(part.kept if part else {}, old.log_items)
        if part:
            link.said, link.overtaken = part.said[spec.index], [*part.overtaken.get(spec.index, ())]
        return link

    @classmethod
    def after_receiver(cls, spec: Channel, old: Link, part: Part | None) -> Link:
        """The sender lives; it sends again what it keeps, from the receiver's part of the checkpoint on."""
        taken = part.ins[spec.index] if part else 0
        link = cls(old.world, spec, taken, taken, [], [])
        if not link.keeps_output:
            old.world.judge.broken("replay", f"nobody keeps what was sent on channel {spec.index}")
        link.before, link.serial, link.log_items = old, old.serial, old.log_items
        link.items = old.mark(part.items if part else {}, 0)
        link.heard = part.heard[spec.index] if part else MIN_WATERMARK
        return link

    def mark(self, marks: dict[int, tuple[int, int]], first: int) -> int:
        """Where the channel was at a checkpoint: ``first``, if that is from before the channel began."""
        serial, items = marks.get(self.index, (-1, 0))
        return items if serial == self.serial else first

    def head(self) -> int:
        """0: nothing, 1: rows, 2: control item, 3: a barrier that overtook (``protocol.subtask.loop.Head``)."""
        if self.urgent:
            return 3
        if not self.queue:
            return 0
        return 1 if type(self.queue[0]) is int else 2

    def take_over_receiver(self, receiver: SimSubtask) -> None:
        """The receiver lives, and takes nothing more of the old sender's: what it has comes again, and is dropped."""
        old = self.before
        assert old is not None
        self.queue, self.urgent, self._came, self._took = old.queue, old.urgent, old._came, old._took
        self.base, self.taken, self.items, self.rows_in = old.base, old.taken, old.items, old.rows_in
        self.heard, self._end_came = old.heard, old._end_came
        self.history = old.history[: old.taken + old.rows_in - old.base]
        first = -self.again
        has = old.items + sum(_is_kept(item) for item in old.queue)
        self.kept, self.again = old.kept[:first], max(has - first, 0)
        if has < first:  # a barrier had overtaken the rest at the sender
            self._send_first(self.overtaken[has - first :], old)
        self.receiver, self.before, old.dead = receiver, None, True

    def _send_first(self, items: list[Item], old: Link) -> None:
        """What the sender's part holds of the channel, and the receiver does not have."""
        rows = [item for item in items if type(item) is int]
        self.world.seen["sent again what was overtaken"] += 1
        place = old.taken + old.rows_in - old.base
        if old.history[place : place + len(rows)] != rows:
            text = f"channel {self.index}: {rows} were overtaken, sent was {old.history[place : place + len(rows)]}"
            self.world.judge.broken("replay", text)
        self.history += rows
        self.waiting.extend(items)
        self.rows_out += len(rows)

    def take_over_sender(self, sender: SimSubtask) -> None:
        """The sender lives, and sends again what the receiver's part of the checkpoint does not hold."""
        old = self.before
        assert old is not None
        self.base, self.history, self.sent, self.kept = old.base, old.history, old.sent, old.kept
        del self.history[self.sent - self.base :]  # what it had yet to send again was for who is gone
        self.waiting = deque(self.kept[self.items :])
        self.rows_out = sum(type(item) is int for item in self.waiting)
        self.said, self._ended = old.said, old._ended
        if self._ended:
            self.waiting.append((END,))
        self.sender, self.before, old.dead = sender, None, True
        self.flush()

    @property
    def behind(self) -> bool:
        """The sender has not yet sent again what the receiver had."""
        return self.again > 0

    def _comes_again(self, item: Item) -> bool:
        """Keep what is sent; true if the receiver has it, and drops it by its number."""
        self.kept.append(item)
        if self.again <= 0:
            return False
        self.again -= 1
        if type(item) is int and not self.dead:
            was = self.history[self.sent - self.base : self.sent - self.base + 1]
            if was != [item]:
                text = f"row {self.sent} of channel {self.index} was {was} and is {item} now"
                self.world.judge.broken("replay", text)
        return True

    def send(self, row: int) -> None:
        if self.keeps and self._comes_again(row):
            self.sent += 1
            return
        self.waiting.append(row)
        self.history.append(row)
        self.sent += 1
        self.rows_out += 1

    def send_control(self, item: tuple[Any, ...]) -> None:
        if item[0] == END:
            self._ended = True
        elif item[0] == WATERMARK:
            self.said = item[1]
        if self.keeps and _is_kept(item) and self._comes_again(item):
            return
        self.waiting.append(item)
        self.flush()

    def flush(self) -> None:
        """What waits at the sender is on its way, if there is credit."""
        moves = self.receiver is not None and not (self._pumping or self.clogs or self.dead or self.before)
        if moves and self.waiting:
            self._pumping = True
            self.world.after(self.world.latency(), self._pump)

    def take_rows(self, most: int) -> list[int]:
        """The next rows, at most so many, none behind a control item."""
        queue, rows = self.queue, list[int]()
        while queue and len(rows) < most and type(queue[0]) is int:
            rows.append(queue.popleft())  # type: ignore[arg-type]
        self.rows_in -= len(rows)
        self.taken += len(rows)
        self.items += len(rows)
        self._took += len(rows)
        if self.waiting:
            self.flush()
        return rows

    def take_control(self) -> tuple[Any, ...]:
        item = self.queue.popleft()
        self._took += 1
        assert type(item) is tuple
        self.items += _is_kept(item)
        if item[0] == WATERMARK:
            self.heard = max(self.heard, item[1])
        if self.waiting:
            self.flush()
        return item

    # ---------------------------------------------------------------------------------------------------- overtaking

    def take_urgent(self) -> tuple[tuple[Any, ...], list[Item]]:
        """A barrier that overtook, and a copy of what it left behind here: rows and watermarks in their order."""
        barrier, ahead_of = self.urgent.popleft()
        left = [self.queue[i] for i in range(min(ahead_of - self._took, len(self.queue)))]
        return barrier, _logged(left)

    def send_urgent(self, barrier: tuple[Any, ...]) -> list[Item]:
        """The barrier goes before everything that waits at the sender; a copy of that."""
        waiting = self.waiting
        place = 0
        while place < len(waiting) and _is_urgent(waiting[place]):
            place += 1
        left = [waiting[i] for i in range(place, len(waiting))]
        waiting.insert(place, (*barrier, "urgent"))
        self.flush()
        return _logged(left)

    def overtake(self, id: int) -> list[Item] | None:
        """The barrier that waits at the sender goes first; a copy of what it overtakes (``None``: it has left)."""
        for place, item in enumerate(self.waiting):
            if type(item) is tuple and item[0] == BARRIER and item[1] == id:
                left = [self.waiting[i] for i in range(place)]
                del self.waiting[place]
                first = sum(map(_is_urgent, left))
                self.waiting.insert(first, (*item, "urgent"))
                self.flush()
                return _logged(left)
        return None

    def expedite(self, id: int) -> None:
        """The barrier that waits at the receiver comes first."""
        for place, item in enumerate(self.queue):
            if type(item) is tuple and item[0] == BARRIER and item[1] == id:
                del self.queue[place]
                self._came -= 1
                self.urgent.append((item, self._took + place))
                return

    def holds_barrier(self, id: int) -> bool:
        """The barrier has not left the sender."""
        return any(type(item) is tuple and item[0] == BARRIER and item[1] == id for item in self.waiting)

    # ------------------------------------------------------------------------------------------------------ delivery

    def _pump(self, _: None) -> None:
        self._pumping = False
        if self.dead or self.clogs:
            return
        waiting, queue = self.waiting, self.queue
        left, was_full = PER_DELIVERY, self.rows_out >= SENDER_FULL
        barriers: list[tuple[Any, ...]] = []
        while waiting and left:
            item = waiting[0]
            if isinstance(item, int):
                if self.rows_in >= CREDIT and not self.back:
                    break
                self.rows_in += 1
                self.rows_out -= 1
                left -= 1
                if self.world.reorders and queue and self.world.draws.chance(64):  # a network without FIFO
                    queue.appendleft(waiting.popleft())
                    self._came += 1
                    continue
            elif item[0] == BARRIER:
                waiting.popleft()
                if item[-1] == "urgent":
                    self.urgent.append((item, self._came))
                    continue
                barriers.append(item)
                queue.append(item)
                self._came += 1
                continue
            elif item[0] == END:
                if self._end_came:
                    waiting.popleft()
                    continue
                self._end_came = True
            queue.append(waiting.popleft())
            self._came += 1
        receiver = self.receiver
        if receiver is not None:
            if self.keeps and self.sender is not None:
                receiver.hear_of(self.sender)
            if barriers and self.world.row.switches:
                self._tell_of(barriers)
            receiver.wake()
        if was_full and self.sender is not None and self.rows_out < SENDER_FULL:
            self.sender.wake()
        if waiting and (self.back or self.rows_in < CREDIT or type(waiting[0]) is tuple):
            self.flush()

    def _tell_of(self, barriers: list[tuple[Any, ...]]) -> None:
        """Row ``unaligned`` wants to know where barriers wait that go in their turn."""
        for barrier in barriers:
            if self.sender is not None:
                self.sender.barrier_left(barrier[1])
            if self.receiver is not None and self.queue and self.queue[0] is not barrier:
                self.receiver.barrier_waits(self, barrier)


def _is_kept(item: Item) -> bool:
    """Who goes back gets it again by its number; an end has none, and is said again."""
    return type(item) is int or item[0] == WATERMARK  # type: ignore[index]


def _is_urgent(item: Item) -> bool:
    return type(item) is tuple and item[-1] == "urgent"


def _logged(items: list[Item]) -> list[Item]:
    """What of the items belongs to a channel's log: an end comes again."""
    return [item for item in items if isinstance(item, int) or item[0] == WATERMARK]


class Pipe:
    """Control messages between a driver and a worker: FIFO, may be clogged, ends with its receiver."""

    __slots__ = ("_held", "_last_ms", "_receive", "_world", "clogs", "dead")

    def __init__(self, world: World, receive: Callable[[Any], None]) -> None:
        self._world, self._receive = world, receive
        self._last_ms = 0.0
        self._held: list[Any] = []
        self.clogs = 0
        self.dead = False

    def send(self, message: Any) -> None:
        if self.clogs:
            self._held.append(message)
        elif not self.dead:
            world = self._world
            at = max(self._last_ms, world.now + world.latency())
            self._last_ms = at
            world.at(at, self._arrive, message)

    def send_out_of_order(self, message: Any) -> None:
        """As a datagram would come: before or after its neighbours."""
        if not self.clogs and not self.dead:
            self._world.after(self._world.latency() + self._world.draws.below(8), self._arrive, message)
        else:
            self._held.append(message)

    def unclog(self) -> None:
        self.clogs -= 1
        if not self.clogs:
            held, self._held = self._held, []
            for message in held:
                self.send(message)

    def _arrive(self, message: Any) -> None:
        if not self.dead:
            self._receive(message)
