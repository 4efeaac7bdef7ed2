"""Simulated network: channels with the product's two ends and a wire between them, and pipes for control messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cutwater.data.time import MIN_WATERMARK
from cutwater.protocol.channel.items import Item, Rows, Timed, rows_in
from cutwater.protocol.channel.receiving import NO_LIMIT, Remaker
from cutwater.protocol.channel.sending import Kept, ReplayBuffer
from cutwater.sim.world.disk import Part, numbers_in

if TYPE_CHECKING:
    from cutwater.sim.schedules.graphs import Channel
    from cutwater.sim.world.subtask import SimSubtask
    from cutwater.sim.world.world import World

FRAMES = 4
"""Frames that wait at the receiver at most; a back-edge has no limit (C7)."""
KEPT_BYTES = 30 * 8
"""A sender whose receiver is lost goes on for so many rows (R4)."""


class Numbers(tuple[int, ...]):
    """Rows of the simulator: a batch of numbers.

    >>> Numbers((1, 2, 3)).slice(1)
    (2, 3)
    """

    @property
    def num_rows(self) -> int:
        return len(self)

    @property
    def nbytes(self) -> int:
        return 8 * len(self)

    def slice(self, offset: int = 0, length: int | None = None) -> Numbers:
        return Numbers(self[offset:] if length is None else self[offset : offset + length])

    @classmethod
    def joined(cls, parts: Sequence[Numbers]) -> Numbers:
        """The rows of several batches, one after the other."""
        return cls(number for part in parts for number in part)


class Link:
    """One channel of one attempt: its ends decide as in the product, what is between them takes its time.

    Rows are numbered from the job's first attempt on: ``history[k - base]`` is row ``k`` of the channel, as it was
    really sent.  An end that lives on while the other one goes back is taken over from the channel ``before``.

    Args:
        restored: part of the checkpoint of the sender and of the receiver; ``None``: the channel is new.
        log: what that holds of the channel itself.
        history: what was really on its way then.
        id: of that checkpoint; 0: none.
        credit: of the sender; ``None``: all places of the receiver.
    """

    __slots__ = (
        "_buffer", "_pumping", "back", "base", "before", "clogs", "credits", "dead", "history", "index", "owed",
        "receiver", "receiving", "sender", "sending", "wire", "world",
    )  # fmt: skip

    def __init__(
        self,
        world: World,
        spec: Channel,
        restored: tuple[Part | None, Part | None] = (None, None),
        log: list[Timed] | None = None,
        history: list[int] | None = None,
        id: int = 0,
        credit: int | None = None,
    ) -> None:
        self.world, self.index, self.back = world, spec.index, spec.back
        sender, receiver = restored
        index, frames = spec.index, NO_LIMIT if spec.back else FRAMES
        sent = sender.outs[index] if sender else receiver.ins[index] if receiver else 0
        self.base = min(receiver.ins[index], sent) if receiver else sent
        self.sending = world.sending_class(
            index,
            self._to_wire,
            credit=frames if credit is None else credit,
            next_row=sent,
            watermark=sender.said[index] if sender else MIN_WATERMARK,
            kept=ReplayBuffer(_keep, most_memory_bytes=KEPT_BYTES, base=id) if world.keeps_output else None,
        )
        log = log or []
        self.receiving = world.receiving_class(
            index,
            frames,
            on_credit=None if spec.back else self._credit,
            credit_batch=FRAMES // 2,
            next_row=next((item.first_row for item in log if type(item) is Rows), sent),
            watermark=receiver.heard[index] if receiver else MIN_WATERMARK,
            join=Numbers.joined if world.schedule.joins_frames else None,
        )
        self.receiving.restore(log)
        self.history = history if history is not None else []
        self._buffer: list[int] = []
        """Rows of the call under way."""
        self.wire: deque[Item] = deque()
        self.credits = 0
        """Held up where the channel is clogged."""
        self.clogs = 0
        self.dead = self._pumping = False
        self.sender: SimSubtask | None = None
        self.receiver: SimSubtask | None = None
        self.before: Link | None = None
        """The channel that this one goes on for, until whoever survived has taken it over."""
        self.owed: int | None = 0
        """Next row that a receiver lacks which lived on; ``None``: not known yet."""

    # ------------------------------------------------------------------------------------------- one end went back

    @classmethod
    def after_sender(cls, spec: Channel, old: Link, part: Part | None, id: int) -> Link:
        """The receiver lives; the sender sends again from its part of the checkpoint on."""
        link = cls(old.world, spec, (part, None), id=id, credit=0)
        link.before, link.owed = old, None
        if part:
            link.sending.restore([*part.overtaken.get(spec.index, ())])
        return link

    @classmethod
    def after_receiver(cls, spec: Channel, old: Link, part: Part | None, log: list[Timed], id: int) -> Link:
        """The sender lives; it sends again what it keeps, from the receiver's part of the checkpoint on."""
        link = cls(old.world, spec, (None, part), log, id=id)
        if not old.sending.keeps:
            old.world.oracle.broken("replay", f"nobody keeps what was sent on channel {spec.index}")
        link.before = old
        return link

    def take_over_receiver(self, receiver: SimSubtask) -> None:
        """The receiver lives, and takes nothing more of the old sender's: what it has comes again, and is dropped."""
        old = self.before
        assert old is not None
        end = self.receiving = old.receiving
        end.take_over(self._credit, Remaker(f"channel {self.index}", 0, 0))
        again, first = self.history, self.base
        self.base = old.base  # of what follows the cut only that is sure which has arrived
        self.history = old.history[: max(end.next_arrival, first) - old.base]
        self._remember(first, again)
        self.receiver, self.before, old.dead = receiver, None, True
        self.owed = end.next_arrival
        self.sending.arrived(end.next_arrival)
        self._granted(NO_LIMIT if self.back else end.places)

    def take_over_sender(self, sender: SimSubtask, id: int) -> None:
        """The sender lives, and sends again what the receiver's part of the checkpoint does not hold."""
        old = self.before
        assert old is not None
        self.sending, self.base, self.history, self._buffer = old.sending, old.base, old.history, old._buffer
        self.sender, self.before, old.dead = sender, None, True
        self.sending.take_over(self._to_wire, id)
        self._granted(NO_LIMIT if self.back else self.receiving.places)

    def die(self) -> None:
        """One end is gone, or both: nothing passes any more; a sender that lives hears of it and goes on (R4)."""
        self.dead = True
        sender, receiver = self.sender, self.receiver
        if sender is not None and not sender.dropped and receiver is not None and receiver.dropped:
            self.world.send(self._let_go)

    def _let_go(self, _: None) -> None:
        sender = self.sender
        if sender is not None and not sender.dropped and self.dead and sender.outputs_hold(self):
            self.sending.let_go()
            sender.wake()

    @property
    def behind(self) -> bool:
        """The sender has not yet sent again what the receiver had."""
        return self.owed is None or self.sending.next_row < self.owed

    # ---------------------------------------------------------------------------------------------- the sending end

    @property
    def key(self) -> int:
        return self.index

    def send(self, row: int) -> None:
        """A row leaves with its neighbours of the same call."""
        self._buffer.append(row)

    def flush_rows(self) -> None:
        """A call is over: what it made for this channel is one frame."""
        if not self._buffer:
            return
        rows, self._buffer = self._buffer, []
        self._remember(self.sending.next_row, rows)
        self.sending.offer(Numbers(rows))

    def _remember(self, first: int, rows: list[int]) -> None:
        """Rows are sent, the first time or again."""
        place = first - self.base
        known = self.history[place : place + len(rows)]
        if known != rows[: len(known)] and not self.dead:
            text = f"rows from {first} on of channel {self.index} were {known} and are {rows} now"
            self.world.oracle.broken("replay", text)
        self.history += rows[len(known) :]

    def offer_barrier(
        self, checkpoint_id: int, final: bool, overtake: bool, probe: bool, savepoint: bool
    ) -> list[Timed]:
        overtaken = self.sending.offer_barrier(checkpoint_id, final, overtake, probe, savepoint)
        self.world.seen["overtook at the sender"] += bool(rows_in(overtaken))
        return overtaken

    def overtake(self, checkpoint_id: int) -> list[Timed]:
        overtaken = self.sending.overtake(checkpoint_id)
        self.world.seen["overtook at the sender"] += bool(rows_in(overtaken))
        return overtaken

    def holds(self, checkpoint_id: int) -> bool:
        return self.sending.holds(checkpoint_id)

    def mark(self, checkpoint_id: int) -> None:
        self.sending.mark(checkpoint_id)

    def settled(self, checkpoint_id: int, completed: bool) -> None:
        self.sending.settled(checkpoint_id, completed)

    def offer_end(self) -> None:
        self.sending.offer_end()

    # ------------------------------------------------------------------------------------------------------ delivery

    def _to_wire(self, item: Item) -> None:
        self.wire.append(item)
        if not self._pumping:
            self.flush()

    def flush(self) -> None:
        """What has left the sender is on its way."""
        if self.wire and self.receiver is not None and not (self._pumping or self.clogs or self.dead or self.before):
            self._pumping = True
            self.world.send(self._pump)

    def unclog(self) -> None:
        self.clogs -= 1
        if not self.clogs:
            credits, self.credits = self.credits, 0
            if credits:
                self._granted(credits)
            self.flush()

    def _pump(self, _: None) -> None:
        self._pumping = False
        receiver = self.receiver
        if self.dead or self.clogs or receiver is None:
            return
        wire, put = self.wire, self.receiving.put
        if self.sender is not None:
            receiver.choices.hear_of(self.sender.choices)
        while wire:
            item = wire.popleft()
            if self.world.reorders and wire and self.world.draws.chance(64):  # a network without FIFO
                put(wire.popleft())
            put(item)
        receiver.wake()

    def _credit(self, frames: int) -> None:
        self.world.send(self._granted, frames)

    def _granted(self, frames: int) -> None:
        if self.dead:
            return
        if self.clogs:
            self.credits += frames
            return
        waited = self.sending.waiting_frames
        self.sending.grant(frames)
        if waited and self.sender is not None:
            self.sender.wake()

    def rows_on_their_way(self, first: int, last: int) -> list[int]:
        """What was really sent, from one row on and before another one."""
        return self.history[first - self.base : last - self.base]


def _keep(rows: Rows, memory_bytes: int) -> Kept:
    return Kept(rows, rows, 0)


def log_of(sender: Part, receiver: Part, channel: int) -> list[int]:
    """The rows that two parts of a checkpoint hold of the channel between them."""
    return numbers_in([*receiver.logs.get(channel, ()), *sender.overtaken.get(channel, ())])


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
            at, last = world.now + world.latency(), self._last_ms
            self._last_ms = at = at if at > last else last
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
