"""What the subtask loop does next: which input, how many rows, or nothing and why.

The loop calls ``decide`` before every step and ``observe`` after every call of an operator.  The decisions are the same
in the runtime and in the simulator; only moving rows and calling operators is the performer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from cutwater.protocol.channel.items import Head
from cutwater.protocol.determinants import CONTROL, OWN, Order
from cutwater.protocol.messages import InputId
from cutwater.protocol.states import State
from cutwater.protocol.subtask.call_size import CallSize
from cutwater.protocol.subtask.machine import SubtaskMachine

CONTROL_RUN = 8
"""Control items taken in a row per input before waiting rows get a turn."""
OUTSIDE_EVERY = 64
"""However much is on its way in a loop, one call in so many takes rows from outside, if there are some."""


class IdleReason(State):
    NOTHING_TO_DO = "nothing to do"
    BLOCKED = "everything that waits lies in blocked inputs"
    OUTPUTS_FULL = "an output is full"
    STOPPED = "a final barrier has passed"
    HALTED = "everything stands still until the outcome of a checkpoint is known"


class Resume(NamedTuple):
    """Let the operator do the next slice of its pending work."""


class TakeControl(NamedTuple):
    """Take the control item at the head of an input (its place in ``inputs``)."""

    input: int


class TakeRows(NamedTuple):
    """Take up to ``max_rows`` rows from an input (its place in ``inputs``)."""

    input: int
    max_rows: int


class ReadSource(NamedTuple):
    """Read up to ``max_rows`` rows."""

    max_rows: int


class FireTimers(NamedTuple):
    """Let the operators do a slice of what is due by processing time."""


class Follow(NamedTuple):
    """Make the next choice of the determinant log, which needs no input."""


class Idle(NamedTuple):
    """Wait until something changes."""

    reason: IdleReason


Action: TypeAlias = Resume | TakeControl | TakeRows | ReadSource | FireTimers | Follow | Idle

_URGENT = int(Head.URGENT)
_RESUME = Resume()
_FIRE = FireTimers()
_FOLLOW = Follow()
_IDLE = {reason: Idle(reason) for reason in IdleReason}


class SubtaskLoop:
    """Decides the next step of one subtask.

    Control items go before rows, so that a barrier is not held up by other inputs' rows; after ``CONTROL_RUN`` of them
    per input rows get a turn.  Rows are taken round robin.  After an unblocking the turn is with the input that was
    blocked first (A5).  With a full output no rows are made: neither taken, nor read, nor resumed; control items go on
    as long as no work is pending.  Timers that are due by processing time take turns with everything else, slice by
    slice, as long as rows may be made; after a final barrier, or the end of input, none fires.

    An urgent barrier goes before everything, from whatever input.  Work left from the last call is finished first, over
    full outputs too: it is bounded, and a barrier that waits for it would wait for the slowest consumer.  While the
    machine is halted nothing else happens.

    Where a loop is entered, rows of the loop go before rows from outside, as long as more than one call's worth of them
    waits: what is on its way in a loop is logged by every snapshot (C3), so that it should be little.  Nothing ever
    idles for that, so that a loop that cannot stop for want of credit (C7) cannot stop for this either; and one call in
    ``OUTSIDE_EVERY`` goes to the rows from outside, or rows that never leave the loop would keep them, and the barriers
    behind them, out for ever.

    Args:
        machine: the protocol machine of the subtask.
        inputs: its inputs; ``heads`` of ``decide`` are in this order.
        slice_budget_ms: time that one call of an operator should take.
        max_rows: upper bound of the rows per call.
        max_call_ms: time that no call should take, whatever its fixed cost (``CallSize``).

    >>> from cutwater.protocol.protocols import PROTOCOLS
    >>> machine = SubtaskMachine("sum 0", ["a", "b"], protocol=PROTOCOLS["aligned"])
    >>> loop = SubtaskLoop(machine, ["a", "b"], 5.0, 1000)
    >>> loop.decide([Head.ROWS, Head.CONTROL], outputs_full=False, operator_pending=False, source_ready=False)
    TakeControl(input=1)
    >>> loop.decide([Head.ROWS, Head.EMPTY], outputs_full=True, operator_pending=False, source_ready=False)
    Idle(reason=<IdleReason.OUTPUTS_FULL: 'an output is full'>)
    """

    def __init__(
        self,
        machine: SubtaskMachine,
        inputs: Sequence[InputId],
        slice_budget_ms: float,
        max_rows: int,
        max_call_ms: float = 1000.0,
    ) -> None:
        self._machine = machine
        self._order: Order | None = None
        self._inputs = tuple(inputs)
        self.loop_first = tuple(i for i, input in enumerate(self._inputs) if input in machine.loop_first)
        """Places of the inputs whose rows go before those of the others; ``decide`` wants to know how many wait."""
        self._others = tuple(i for i in range(len(self._inputs)) if i not in self.loop_first)
        self._passed_over = self._loop_next = 0
        self._index = {input: i for i, input in enumerate(self._inputs)}
        self.calls = CallSize(slice_budget_ms, max_call_ms, max_rows)
        """What calls of the operators cost, and how many rows the next one gets."""
        self._open = [True] * len(self._inputs)
        self._seen_version = machine.block_version
        self._next = 0
        self._controls = 0
        self._fired = False
        self._take_control = [TakeControl(i) for i in range(len(self._inputs))]
        self._set_rows(self.calls.rows)
        self._refresh()

    def decide(
        self,
        heads: Sequence[int],
        *,
        outputs_full: bool,
        operator_pending: bool,
        source_ready: bool,
        timers_due: bool = False,
        loop_rows: int = 0,
    ) -> Action:
        """The next step.

        Args:
            heads: a ``Head`` per input.
            outputs_full: at least one output takes no more rows.
            operator_pending: an operator of the chain has work left from its last call.
            source_ready: the source may have rows to read.
            timers_due: an operator waits for a processing time that has come.
            loop_rows: rows that wait in the inputs ``loop_first``.
        """
        if _URGENT in heads:
            return _RESUME if operator_pending else self._take_control[heads.index(_URGENT)]
        if self._machine.block_version != self._seen_version:
            self._refresh()
        if self._halted:
            return _IDLE[IdleReason.HALTED]
        if operator_pending:
            return _IDLE[IdleReason.OUTPUTS_FULL] if outputs_full else _RESUME
        if self._order is not None:
            run = self._order.next_run()
            if run is not None:
                return self._follow(*run, heads, outputs_full)
            self._order = None
        self._fired = timers_due and not self._fired and not outputs_full and self._machine.may_read
        if self._fired:
            return _FIRE
        if not self._inputs:
            return self._decide_source(outputs_full, source_ready)
        control, rows, blocked = self._scan(heads)
        if control >= 0 and (rows < 0 or outputs_full or self._controls < CONTROL_RUN * len(self._inputs)):
            self._controls += 1
            return self._take_control[control]
        if rows < 0:
            return _IDLE[IdleReason.BLOCKED if blocked else IdleReason.NOTHING_TO_DO]
        if outputs_full:
            return _IDLE[IdleReason.OUTPUTS_FULL]
        self._controls = 0
        return self._take_rows[self._whose_turn(heads, rows, loop_rows)]

    @property
    def free(self) -> bool:
        """True if no log is followed and no timer has just fired.

        Where no item waits, no call is unfinished and no timer is due, ``decide`` need not be asked then.
        """
        return not self._fired and self._order is None

    def follow(self, order: Order) -> None:
        """Take what the log says, as far as it goes, and nothing else (R0)."""
        self._order = order

    def _follow(self, input: InputId, rows: int, heads: Sequence[int], outputs_full: bool) -> Action:
        """The next choice of the log, once what it needs is there: rows that are sent again come as they come."""
        if input is OWN:
            return _IDLE[IdleReason.OUTPUTS_FULL] if outputs_full else _FOLLOW
        index = self._index[input]
        if heads[index] == Head.CONTROL:  # also where rows come next: what says nothing new is no choice
            return self._take_control[index]
        if rows == CONTROL or heads[index] != Head.ROWS:
            return _IDLE[IdleReason.NOTHING_TO_DO]
        return _IDLE[IdleReason.OUTPUTS_FULL] if outputs_full else TakeRows(index, min(rows, self._rows))

    def observe(self, rows: int, elapsed_ms: float) -> None:
        """A call of the operators took ``elapsed_ms`` for ``rows`` rows: adapt the rows per call."""
        if rows > 0:
            self.calls.observe(rows, elapsed_ms)
            if self.calls.rows != self._rows:
                self._set_rows(self.calls.rows)

    def _decide_source(self, outputs_full: bool, source_ready: bool) -> Action:
        if not self._machine.may_read:
            return _IDLE[IdleReason.STOPPED]
        if not source_ready:
            return _IDLE[IdleReason.NOTHING_TO_DO]
        return _IDLE[IdleReason.OUTPUTS_FULL] if outputs_full else self._read_source

    def _scan(self, heads: Sequence[int]) -> tuple[int, int, bool]:
        """Index of the next input with a control item and with rows (-1: none), and whether a blocked one waits."""
        open, rows, blocked = self._open, -1, False
        count = len(open)
        for i in range(self._next, self._next + count):
            if i >= count:
                i -= count
            head = heads[i]
            if not head:
                continue
            if not open[i]:
                blocked = True
            elif head == 2:
                return i, rows if rows >= 0 else self._rows_after(heads, i), blocked
            elif rows < 0:
                rows = i
        return -1, rows, blocked

    def _rows_after(self, heads: Sequence[int], control: int) -> int:
        """The next input with rows behind ``control``, in turn; needed only to bound a run of control items."""
        count = len(self._open)
        for i in range(control + 1, self._next + count):
            if i >= count:
                i -= count
            if heads[i] == 1 and self._open[i]:
                return i
        return -1

    def _whose_turn(self, heads: Sequence[int], rows: int, loop_rows: int) -> int:
        """The input to take rows from: ``rows``, unless more than a call's worth waits that came round the loop."""
        if loop_rows > self._rows:
            loop = self._in_turn(heads, self.loop_first, self._loop_next)
            others = self._in_turn(heads, self._others, self._next)
            if loop >= 0 and others >= 0:
                self._passed_over += 1
                if self._passed_over < OUTSIDE_EVERY:
                    self._loop_next = loop + 1  # the others' turns stay as they are
                    return loop
                self._passed_over, rows = 0, others
        self._next = rows + 1 if rows + 1 < len(self._inputs) else 0
        return rows

    def _in_turn(self, heads: Sequence[int], among: Sequence[int], start: int) -> int:
        """Of these inputs the next, from ``start`` on, that is open and has rows at its head; -1 if there is none."""
        ready = [i for i in among if heads[i] == 1 and self._open[i]]
        return min(ready, key=lambda i: (i < start, i), default=-1)

    def _refresh(self) -> None:
        machine = self._machine
        self._seen_version = machine.block_version
        self._halted = machine.halted
        self._open = [machine.can_take(input) for input in self._inputs]
        if machine.unblocked and self._open and self._index.keys() >= set(machine.unblocked):
            self._next = self._index[machine.unblocked[0]]

    def _set_rows(self, rows: int) -> None:
        self._rows = rows
        self._take_rows = [TakeRows(i, rows) for i in range(len(self._inputs))]
        self._read_source = ReadSource(rows)
