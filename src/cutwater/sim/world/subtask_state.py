"""What a simulated subtask consists of, and its part of a snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK
from cutwater.protocol import messages as m
from cutwater.protocol.replay.determinants import DeterminantLog
from cutwater.protocol.subtask.loop import SubtaskLoop
from cutwater.protocol.subtask.stages import Phase
from cutwater.protocol.subtask.watermarks import InputTime, WatermarkMerger
from cutwater.sim.world.channels import Item, Link
from cutwater.sim.world.output import Handle, Piece, SinkWriter

if TYPE_CHECKING:
    from cutwater.sim.world.attempt import Attempt
    from cutwater.sim.world.worker import SimWorker

ROWS_PER_SLICE = 4


class Part:
    """A subtask's part of a snapshot."""

    __slots__ = (
        "attempt", "choice", "counts", "ended", "files", "handles", "has_ended", "heard", "ins", "items", "kept",
        "logs", "outs", "overtaken", "pieces", "positions", "said", "sign", "task", "watermark",
    )  # fmt: skip

    task: int
    attempt: int
    positions: dict[int, int]
    """Of a source: split -> rows read."""
    counts: dict[int, int]
    sign: int
    """Digest of all rows processed, in their order."""
    ins: dict[int, int]
    """Channel -> rows taken."""
    outs: dict[int, int]
    """Channel -> rows sent."""
    items: dict[int, tuple[int, int]]
    """R4, input -> serial of the channel, rows and control items taken."""
    kept: dict[int, tuple[int, int]]
    """R4, output -> serial of the channel, rows and control items sent."""
    choice: tuple[int, int]
    """R0: lineage of the determinant log, and position in it."""
    watermark: int
    """The event time that it had reached."""
    heard: dict[int, int]
    """Input -> last watermark taken."""
    said: dict[int, int]
    """Output -> last watermark sent."""
    ended: frozenset[Any]
    """Inputs whose end it had taken."""
    has_ended: bool
    """It has sent its end on all outputs."""
    handles: list[Handle]
    """Pre-commits that are not committed yet."""
    pieces: tuple[Piece, ...]
    """Staged rows that are in no part yet."""
    logs: dict[int, list[Item]]
    """Recorded at the inputs."""
    overtaken: dict[int, list[Item]]
    """Overtaken by the barrier in the outputs' queues."""
    files: list[str]


class SubtaskState:
    """The core objects of a subtask, its channels, and what it remembers."""

    def __init__(self, worker: SimWorker, attempt: Attempt, task: int, part: Part | None) -> None:
        world = worker.world
        self.graph = graph = attempt.plan.graph
        self.world, self.worker, self.attempt, self.task = world, worker, attempt, task
        self.known = worker.known.setdefault(attempt.plan.region_of[task], {})
        self.step = graph.tasks[task][0]
        self.inputs: list[Link] = [attempt.links[c] for c in graph.inputs[task]]
        self.outputs: list[Link] = [attempt.links[c] for c in graph.outputs[task]]
        self._links = attempt.links
        back = graph.back.intersection(graph.inputs[task])
        self.machine = world.machine_class(
            graph.names[task],
            graph.inputs[task],
            protocol=world.row,
            back_edges=back,
            loop_inputs=graph.loop_inputs[task],
            last_checkpoint_id=attempt.first_id,
        )
        self.loop = SubtaskLoop(self.machine, graph.inputs[task], 5.0, ROWS_PER_SLICE)
        self.merger = WatermarkMerger(graph.inputs[task], back, graph.loop_inputs[task])
        self._is_head, self._outside = bool(back), frozenset(graph.inputs[task]) - graph.loop_inputs[task]
        self._in_loop = graph.loop_outputs[task]
        self._asked = False
        self._times: dict[int, tuple[bool, InputTime, bool]] = {}
        """At the freeze of a wave: all has passed; time of what comes from outside the loop."""
        self._aborted: set[int] = set()
        self._blocked: list[Any] = []
        self._answers: list[m.Event] = []
        """What the machine hears once all effects of the event under way are performed."""
        self._moves, self._moody = graph.moves[task], graph.steps[self.step].moody
        self._is_source = task in graph.sources
        self.positions = dict(part.positions) if part else dict.fromkeys(graph.splits.get(task, ()), 0)
        self.counts = dict(part.counts) if part else {}
        self.sign = part.sign if part else 0
        self.watermark = part.watermark if part else MIN_WATERMARK
        pieces = part.pieces if part else ()
        self.sink = SinkWriter(world, task, attempt.number, pieces) if task in graph.sinks else None
        self._parts: dict[int, Part] = {}
        self._logs: dict[int, dict[int, list[Item]]] = {}
        """Channel -> checkpoint -> log under way."""
        self.awake = True
        """Something has changed since it last found nothing to do."""
        self._seen_version, self._seen_phase = 0, self.machine.phase
        self.ready_ms = 0.0
        self._ending = self.finished = self.running = False
        """``running``: all that begins with it is ready."""
        self.dropped = False
        """Its region, or the whole job, goes back; it does nothing any more."""
        self.order: DeterminantLog | None = None
        """What it chose, from ``follow`` on, if that is kept."""
        self._choice = part.choice[1] if part and world.keeps_order and part.choice[0] == attempt.lineage else 0
        self.behind = world.keeps_order and attempt.lineage != attempt.number
        """It sends again what receivers have."""
        if part:
            times: dict[Any, InputTime] = {c: InputTime(time) for c, time in part.heard.items()}
            if world.keeps_order:  # an end that was taken before the cut is not in the log
                times |= dict.fromkeys(part.ended, InputTime(MAX_WATERMARK))
            self.merger.restore(times, part.watermark if self.inputs else MIN_WATERMARK)

    @property
    def loop_rows(self) -> int:
        """Rows that wait in the inputs that ``SubtaskLoop`` puts first."""
        return sum(self.inputs[i].rows_in for i in self.loop.loop_first)

    @property
    def name(self) -> str:
        return self.graph.names[self.task]

    def _want_probe(self) -> None:
        """A head asks for a wave while it holds a watermark, or while its outside has ended and its loop has not."""
        if not self._is_head or self._asked or self.machine.phase in (Phase.ENDED, Phase.FINISHED):
            return
        if self.merger.held or (self._outside and self._outside <= self.machine.ended):
            self._asked = True
            self.worker.tell("probe", self.attempt.number, self.task)
