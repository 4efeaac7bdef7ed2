"""One attempt in one worker: its subtasks, their channels and the snapshots in progress."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cutwater.data.time import MIN_WATERMARK
from cutwater.errors import NondeterminismError, WireError
from cutwater.protocol import messages as m
from cutwater.protocol.job.recovery_scope import Place, partners
from cutwater.protocol.subtask.host import LoopReport
from cutwater.protocol.wire import Peer, Refusal
from cutwater.runtime.channels.connection import Connection
from cutwater.runtime.control import messages as c
from cutwater.runtime.control.determinant_logs import DeterminantLogs, PeerDeterminants
from cutwater.runtime.copies.copies import CopyReader, lengths_of
from cutwater.runtime.worker.commits import CommitEnded, CommitService
from cutwater.runtime.worker.peers import ConnectedAttempt, ExpectedPeer, PeerArrived, PeerLost, place_of
from cutwater.runtime.worker.restore import Restore
from cutwater.runtime.worker.snapshots import (
    CheckpointStage,
    FrozenSubtask,
    SnapshotService,
    SubtaskLogs,
    WorkerCheckpoints,
    Written,
)
from cutwater.runtime.worker.subtask import Subtask
from cutwater.runtime.worker.wiring import Wiring

if TYPE_CHECKING:
    from cutwater.runtime.chains.chain import SinkOperator
    from cutwater.runtime.chains.source_runner import SourceRunner
    from cutwater.runtime.channels.output import OutputChannel
    from cutwater.runtime.worker.tracing import WorkerTrace
    from cutwater.runtime.worker.worker import Worker, WorkerArgs

NEWS_DEADLINE_S = 15.0
"""For the first word of every other worker, which has built its part by then."""


_LATE_COMMIT_S = 60.0
"""Sleeps until a commit has ended, which wakes the worker."""


class Attempt(ConnectedAttempt):
    """Everything of one attempt of one region.  Owned by the worker's loop thread.

    With ``recovery="task"`` a region is what lives in one worker, with ``"upstream"`` it is what goes back at the loss
    of the same workers, and rows pass between regions.  When others go back, this one gives up the connections to them
    (``c.PeersReset``) and lets them dial anew; its channels go on over the new connection: outputs send again what they
    keep, inputs drop by number what they have.  Otherwise there are no connections between regions.

    Args:
        deploy: what the coordinator asks for.
        worker: the process it lives in.
        args: what runs in it.
    """

    def __init__(self, deploy: c.Deploy, worker: Worker, args: WorkerArgs) -> None:
        recovery = worker.args.config.recovery
        plan, division = args.plan, args.division
        self._plan, self._division, self._takes_upstream = plan, division, recovery == "upstream"
        self._alone = recovery in ("upstream", "task") and len(division.regions) > 1
        others = partners(division, recovery, (worker.args.slot, deploy.region))
        super().__init__(deploy, worker, deploy.region, others)
        self._wiring: Wiring | None = None
        self._restored = deploy.restore.checkpoint_id if deploy.restore is not None else 0
        self._logs = DeterminantLogs(self._restored) if worker.args.config.records_order else None
        """What the worker knows of determinant logs, if a recovery needs them (R0)."""
        self._numbers = list(deploy.attempts)
        self._survivors = frozenset(deploy.survivors)
        self._expected: dict[Place, ExpectedPeer] = {}
        """Replaced, never changed: threads of the data server look into it."""
        self._behind: list[tuple[Place, OutputChannel]] | None = None
        """Outputs that have not sent again what their receivers have; ``None``: the coordinator does not wait."""
        self._deploy, self._store = deploy, args.store
        self._subtasks: list[Subtask] = []
        self._next = 0
        """Of the subtasks: whose turn is next."""
        self._worked = False
        """Since the first one's turn, whatever interrupted the round: who worked may have more to do."""
        self._handed_down = False
        """Something went to a subtask of this worker since the last turns."""
        self._by_key: dict[tuple[int, int], Subtask] = {}
        self._checkpoints = WorkerCheckpoints()
        self._counters: dict[str, dict[str, int]] = {}
        self._started_s = time.monotonic()
        self._snapshots: SnapshotService | None = None
        self._commits = CommitService(self._post)
        self._copies = worker.copies
        self._reader: CopyReader | None = None
        self._trace: WorkerTrace | None = None
        self._to_coordinator: PeerDeterminants | None = None
        """Where verdicts on loops rest on choices (R0)."""

    # ------------------------------------------------------------------------------------------------------ build

    def build(self) -> None:
        """Connect to all workers, build the subtasks and restore them.

        Raises:
            InterruptedBuildError: the coordinator changed its mind.
            CutwaterError: a peer cannot be reached, or the snapshot cannot be read.
        """
        self._connect()
        deploy, config = self._deploy, self._config
        args = self._worker.args
        if self._copies is not None:
            self._reader = self._copies.reader(deploy.copies)
        restore = Restore.load(self._store, args.job, args.uid, deploy, self._plan, self._reader)
        self._wiring = Wiring(
            self._plan,
            config,
            slot=self._slot,
            division=self._division,
            attempt=self.number,
            job_uid=args.uid,
            connections=self._connections,
            restore=restore,
            deploy=deploy,
            notify=self._worker.signal.set,
            handed_down=self._hand_down,
            count=self._count,
            trace=self._open_trace(),
            logs=self._logs,
        )
        self._subtasks = self._wiring.build(self)
        if self._reader is not None:
            self._reader.close()
        self._by_key = {s.key: s for s in self._subtasks}
        self._snapshots = SnapshotService(
            self._store,
            args.job,
            attempt=self.number,
            writer=self._slot + self.region * self._plan.parallelism,
            writers=self._plan.parallelism * len(self._division.regions),
            subtasks=len(self._subtasks),
            inline_threshold_bytes=config.inline_threshold_bytes,
            incremental=config.tracks_changes,
            continued=0 if config.keeps_copies or not self._store.appends else min(2, config.num_retained),
            restored=restore.increments(),
            done=self._post,
        )
        for place, connection in self._connections.items():
            self._share(place, connection)
        self._start_connections()
        if self._logs is not None:
            self._begin(self._logs)
        if self._survivors:  # they have rows that this one will send again
            outputs_to = self._wiring.outputs_to
            self._behind = [(place, o) for place in sorted(self._survivors) for o in outputs_to(place)]

    def _begin(self, known: DeterminantLogs) -> None:
        """Each subtask follows what anybody knows of its determinant log, as far as that goes."""
        from cutwater.runtime.worker.recording import RecordingSubtask

        if self._deploy.news:
            known.peer("coordinator").hear(self._deploy.news)
        if self._plan.loops:
            self._to_coordinator = known.peer("coordinator")
        if not known.await_first(self._others, self._check_wanted, NEWS_DEADLINE_S):
            raise WireError(
                f"within {NEWS_DEADLINE_S:.0f} s not everybody told worker {self._slot} what determinants are known"
            )
        ordered = [s for s in self._subtasks if isinstance(s, RecordingSubtask)]
        logs = known.begin((s.key for s in ordered), self._restored)
        for subtask in ordered:
            subtask.begin(logs[subtask.key])

    @property
    def following(self) -> bool:
        """A subtask makes choices once more that somebody knows: no checkpoint may begin."""
        return any(subtask.following for subtask in self._subtasks)

    def finish(self) -> None:
        self._commits.finish()

    def close(self) -> None:
        """Stop everything of this attempt; commits nothing."""
        if self._reader is not None:
            self._reader.close()
        self._close_connections()
        self._commits.close()  # first, as the snapshots: threads use the sinks
        if self._snapshots is not None:
            self._snapshots.close(self._checkpoints.values())
        for subtask in self._subtasks:
            with contextlib.suppress(Exception):
                subtask.close()
        if self._trace is not None:
            self._trace.close()

    def _open_trace(self) -> WorkerTrace | None:
        folder = self._config.trace_dir
        if folder is None:
            return None
        from cutwater.runtime.worker.tracing import WorkerTrace, part_of_worker

        uid, deploy = self._worker.args.uid, self._deploy
        incarnation = deploy.incarnations[self._slot]
        file = part_of_worker(
            folder, self._plan.name, uid, attempt=self.number, slot=self._slot, incarnation=incarnation
        )
        self._trace = WorkerTrace(file, self._plan, uid, attempt=self.number, restored=self._restored or None)
        return self._trace

    # ------------------------------------------------------------------------------------------------------ running

    def round(self, now_s: float) -> float:
        """A turn of every subtask; returns how long the loop may sleep (0: not at all).

        A worker that rested until now has time: what each subtask gives out leaves at the end of its turn, and those
        behind it have theirs.  If then all are at rest, that was all, and nobody looks a second time.
        """
        if self._commits.behind:
            return _LATE_COMMIT_S
        at_rest, self.rested = self.rested, False
        for subtask in self._subtasks:
            if subtask.attend(now_s):
                self._worked, at_rest = True, False
        for subtask in self._subtasks[self._next :]:
            self._worked |= subtask.round(now_s)
            if not subtask.interrupted:
                self._next += 1
            at_rest = at_rest and subtask.at_rest
            if at_rest:
                subtask.flush_idle()
            if self.called:
                return 0.0
        worked, self._worked = self._worked, False
        self._next = 0
        if worked and at_rest:
            worked, now_s = False, time.monotonic()
        self._report_times(now_s)
        if self._behind is not None:
            self.tell_if_caught_up(following=self.following)
        self._handed_down = False
        wake_s = min((s.flush_if_due(now_s) for s in self._subtasks), default=float("inf"))
        if not worked:
            for subtask in self._subtasks:
                worked |= subtask.flush_idle()
        if worked or self._handed_down:
            return 0.0
        sleep_s = min((s.wait_s(now_s) for s in self._subtasks), default=float("inf"))
        return max(0.0, min(sleep_s, wake_s - now_s))

    def _hand_down(self) -> None:
        """Something goes to a subtask whose turn comes later in the same round."""
        self._handed_down = True

    def _report_times(self, now_s: float) -> None:
        """How far the sources have come, for those of their steps that have nothing to read."""
        for subtask in self._subtasks:
            if subtask.source is not None and (time := subtask.source.report(now_s)) is not None:
                message = c.SourceTime(self.number, self.region, subtask.source.step, subtask.key[1], *time)
                self._worker.link.send(message)

    def take(self, message: object) -> None:
        """A message of the coordinator, or the outcome of a snapshot."""
        match message:
            case c.Start(attempt=attempt):
                self.running = self.running or attempt == self.number
            case c.Trigger():
                self._trigger(message)
            case c.Drain():
                for source in self._sources():
                    source.drain()
            case c.AssignSplits(step=step, splits=splits, no_more=no_more):
                for source in self._sources(step):
                    source.assign(splits, no_more)
            case c.StepTime(step=step):
                for source in self._sources(step):
                    source.hear_step_time(message.watermark, message.idle, message.report)
            case c.ReadUpTo(limits=limits):
                for source in self._sources():
                    source.limit = limits.get(source.step)
            case c.CompleteNotice():
                self._complete(message)
            case c.GloballyCommitted(checkpoint_id=checkpoint_id):
                for subtask in self._subtasks:
                    subtask.committed_globally(checkpoint_id)
            case c.AbortNotice(checkpoint_id=checkpoint_id, latest_completed=latest):
                for subtask in self._subtasks:
                    subtask.core.outcome(m.AbortNotice(checkpoint_id, latest))
                aborted = self._checkpoints.pop(checkpoint_id, None)
                if aborted is not None and self._snapshots is not None:
                    self._snapshots.drop(aborted)
            case c.LoopVerdict(checkpoint_id=checkpoint_id, vertices=vertices, ended=ended, watermark=watermark):
                for subtask in self._subtasks:
                    if subtask.key[0] in vertices:
                        subtask.core.when_idle(m.LoopVerdict(checkpoint_id, ended, watermark))
            case Written():
                self._on_written(message)
            case CommitEnded():
                self._commit_ended(message)
            case c.PeersReset():
                self.turn(message)
            case PeerArrived(connection=connection):
                self.arrived(connection)
            case PeerLost():
                self.peer_lost(message)
            case _:
                pass

    def _sources(self, step: str = "") -> list[SourceRunner]:
        """The sources that run here: of a step, or all."""
        return [s.source for s in self._subtasks if s.source is not None and step in ("", s.source.step)]

    def _complete(self, notice: c.CompleteNotice) -> None:
        checkpoint_id, commit = notice.checkpoint_id, notice.commit
        assert self._snapshots is not None
        self._snapshots.completed(checkpoint_id)
        if commit and self._logs is not None:  # a recovery relies on it
            self._logs.completed(checkpoint_id)
        completed = self._checkpoints.pop(checkpoint_id, None)
        if self._copies is not None and notice.files is not None:
            self._copies.completed(checkpoint_id, notice.files, completed.lengths if completed is not None else {})
        for subtask in self._subtasks:
            subtask.core.outcome(m.CompleteNotice(checkpoint_id, commit))
        if commit and notice.answer:
            if self._commits.busy:
                self._commits.answer(checkpoint_id)
            else:
                self._tell_committed(checkpoint_id)

    def _commit_ended(self, ended: CommitEnded) -> None:
        self._commits.heard(ended)
        if ended.key is not None:
            self._by_key[ended.key].committed(ended.checkpoint_id)
        else:
            self._tell_committed(ended.checkpoint_id)

    def _tell_committed(self, checkpoint_id: int) -> None:
        self._worker.link.send(c.Committed(self.number, checkpoint_id, self.region))

    def _trigger(self, trigger: c.Trigger) -> None:
        """To the sources; to every subtask where all freeze at once (``synchronous``), which a savepoint does not."""
        if trigger.savepoint:
            assert self._snapshots is not None
            self._snapshots.savepoint(self._checkpoints[trigger.checkpoint_id], trigger.savepoint)
        event = m.Trigger(trigger.checkpoint_id, trigger.final, trigger.probe, bool(trigger.savepoint))
        everyone = self._config.protocol == "synchronous" and not event.savepoint
        for subtask in self._subtasks:
            if everyone or subtask.source is not None:
                subtask.core.when_idle(event)

    def _on_written(self, written: Written) -> None:
        if written.fatal is not None:
            raise written.fatal
        checkpoint_id = written.checkpoint_id
        checkpoint = self._checkpoints.get(checkpoint_id)
        if checkpoint is None:
            return  # it was aborted meanwhile
        if written.error is not None:
            checkpoint.written.clear()
            checkpoint.error = written.error
            for subtask in self._subtasks:
                subtask.core.handle(m.WriteFailed(checkpoint_id, str(written.error)))
            return
        checkpoint.written.append(written)
        for record in written.subtasks:
            self._by_key[record.vertex, record.subtask].core.handle(m.Durable(checkpoint_id))
        for key in written.logs_of:
            self._by_key[key].core.handle(m.LogsDurable(checkpoint_id))

    # ------------------------------------------------------------------------------------------------------- peers

    def _dials(self, other: Place) -> bool:
        return other in self._survivors or super()._dials(other)

    def _share(self, place: Place, connection: Connection) -> None:
        """Tell of determinant logs what concerns the other end, and hear what it knows."""
        if self._logs is None:
            return
        division, (slot, region) = self._division, place
        own = frozenset(subtask for subtask in division.regions[region] if subtask[1] == slot)
        concern = None
        if self._takes_upstream:
            concern = frozenset(s for r in division.with_upstream({region}) for s in division.regions[r])
        connection.share(self._logs.peer(place, own, concern))

    @property
    def has_company(self) -> bool:
        """Also those that it has no connection with: somebody may wait for them before it says its first word."""
        return self._alone and any(slot == self._slot and r != self.region for slot, r in self._division.parts)

    def check_peer(self, peer: Peer) -> Refusal | None:
        """Whether a dialling worker belongs to this attempt, or may replace one that did (any thread)."""
        if self.building or not self._alone:
            return super().check_peer(peer)
        expected = self._expected.get(place_of(peer))
        if expected is None or peer.attempt > expected.attempt:
            return Refusal(f"attempt {peer.attempt} is not known here yet", later=True)
        if (peer.attempt, peer.incarnation) != (expected.attempt, expected.incarnation):
            return Refusal(f"worker {peer.worker} was replaced")
        return None

    def accept(self, connection: Connection) -> None:
        """A connection that another worker dialled (any thread)."""
        if self.building:
            super().accept(connection)
        else:
            self._post(PeerArrived(connection))

    # ------------------------------------------------------------------------------------------ while others go back

    def turn(self, turn: c.PeersReset) -> None:
        """Others go back: nothing of theirs is taken from now on but over new connections."""
        gone = {place for place in self._others if place[1] in turn.regions}
        for place in gone:
            old = self._connections.pop(place, None)
            if old is not None:
                old.close()
                self._let_go(place)
            self._numbers[place[1]] = turn.attempt
        if self._behind:  # what they had is lost with them
            self._behind = [(place, channel) for place, channel in self._behind if place not in gone]
        self._expected = self._expected | {
            place: ExpectedPeer(turn.attempt, turn.incarnations[place[0]], turn.checkpoint_id) for place in gone
        }

    def _let_go(self, place: Place) -> None:
        """Nothing reaches this place any more: who sends there need not stand still until it is filled again."""
        for sender in self._wiring.outputs_to(place) if self._wiring is not None else ():
            sender.let_go()

    def arrived(self, connection: Connection) -> None:
        """A replacement is there: go on with it.

        Raises:
            InvariantError: what it lacks is not kept.
        """
        place = place_of(connection.peer)
        if self.check_peer(connection.peer) is not None or place in self._connections:
            connection.close()
            return
        self._connections[place] = connection
        wiring = self._wiring
        assert wiring is not None  # it was built
        self._share(place, connection)  # what is known goes first
        for key, receiver in wiring.inputs_from(place):
            edge = self._plan.edges[key.edge]
            connection.take_over_input(key, receiver, edge.schema, edge.source_step)
        for sender in wiring.outputs_to(place):
            connection.take_over_output(sender, self._expected[place].checkpoint_id)
        connection.start(self._lost)

    def peer_lost(self, lost: PeerLost) -> None:
        """A connection ended: if the other end lives, one of the two goes back, and all others run on that can.

        Raises:
            CutwaterError: this one goes back.
        """
        place = next((place for place, known in self._connections.items() if known is lost.connection), None)
        if place is None:
            return
        region = place[1]
        if not self._alone or region == self.region or not isinstance(lost.error, WireError):
            raise lost.error
        needs = self._division.with_upstream({self.region})
        outlives = region in needs if self._takes_upstream else self._place < place
        self._let_go(place)
        if outlives:  # the other end sees it, too, and does not
            self._worker.report(lost.error, self._numbers[region], region)

    # ------------------------------------------------------------------------------------------------ as replacement

    def tell_if_caught_up(self, following: bool) -> None:
        """No barrier may leave before the receivers have nothing that is still to be sent.

        Raises:
            NondeterminismError: an output has ended with fewer rows than its receiver has.

        Args:
            following: a subtask still takes its inputs in an order that others know of.
        """
        self._behind = [(place, output) for place, output in self._behind or () if self._owes(place, output)]
        if not self._behind and not following:
            self._behind = None
            self._worker.link.send(c.CaughtUp(self.number, self.region))

    def _owes(self, place: Place, output: OutputChannel) -> bool:
        connection = self._connections.get(place)
        arrived = connection.arrived.get(output.key) if connection is not None else None
        if arrived is None:
            return True
        if output.ended and output.next_row < arrived:
            edge = self._plan.edges[output.key.edge]
            raise NondeterminismError(
                f"subtask {output.key.source} made {output.next_row} rows for {edge.target_step!r} once more, "
                f"where it had made {arrived} of the same input",
                step=edge.source_step,
            )
        # An end that came is not owed: behind it only barriers come, and in a loop it may need one to come again (C6).
        return output.next_row < arrived

    # ------------------------------------------------------------------------------- what subtasks ask for (port)

    @property
    def called(self) -> bool:
        return self._worker.called

    def submit_snapshot(self, part: FrozenSubtask | SubtaskLogs) -> None:
        assert self._snapshots is not None
        self._snapshots.submit(self._checkpoints[part.checkpoint_id], part)

    def forget_snapshot(self, checkpoint_id: int) -> None:
        assert self._snapshots is not None
        self._snapshots.drop(self._checkpoints[checkpoint_id])

    def commit(self, subtask: tuple[int, int], checkpoint_id: int, sinks: Sequence[SinkOperator]) -> None:
        self._commits.submit(subtask, checkpoint_id, sinks)

    def acknowledge(self, subtask: tuple[int, int], checkpoint_id: int, report: LoopReport | None) -> None:
        """One message for all subtasks of the worker, once the last of them acknowledges."""
        checkpoint = self._checkpoints[checkpoint_id]
        checkpoint.acknowledged[subtask] = report
        if len(checkpoint.acknowledged) < len(self._subtasks):
            return
        checkpoint.stage = CheckpointStage.ACKNOWLEDGED
        parts, checkpoint.written = checkpoint.written, []
        if self._copies is not None:
            checkpoint.lengths = lengths_of(entry for part in parts for entry in part.entries)
        reports = [
            c.LoopReport(*key, r.quiet, r.outside_ended, r.drained, (r.outside.watermark, r.outside.idle))
            for key, r in checkpoint.acknowledged.items()
            if r is not None
        ]
        self._worker.link.send(
            c.Ack(
                self.number,
                checkpoint_id,
                [record for part in parts for record in part.subtasks],
                [entry for part in parts for entry in part.entries],
                round(max((part.freeze_ms for part in parts), default=0.0), 3),
                round(sum(part.write_ms for part in parts), 3),
                reports,
                probe=not parts,
                region=self.region,
                files=[file for part in parts for file in part.files],
                news=self._to_coordinator.news() if self._to_coordinator is not None else b"",
            )
        )

    def probe_wanted(self, subtask: tuple[int, int]) -> None:
        self._worker.link.send(c.ProbeWanted(self.number, *subtask, self.region))

    def decline(self, subtask: tuple[int, int], effect: m.Decline) -> None:
        vertex, index = subtask
        number, id, checkpoint = self.number, effect.checkpoint_id, self._checkpoints.get(effect.checkpoint_id)
        error = checkpoint.error if checkpoint is not None else None
        message = error.message if error is not None else effect.detail
        told = (type(error).__name__, error.step or "", error.hint) if error is not None else None
        self._worker.link.send(c.Decline(number, id, vertex, index, effect.reason.code, message, self.region, told))

    def finished(self, subtask: tuple[int, int]) -> None:
        self._worker.link.send(c.Finished(self.number, *subtask, self.region))

    # ------------------------------------------------------------------------------------------------------ metrics

    def _count(self, step: str, metric: str, amount: int) -> None:
        counters = self._counters.setdefault(step, {})
        counters[metric] = counters.get(metric, 0) + amount

    def metrics(self) -> c.Metrics:
        """Counters since the attempt began."""
        rows_in: dict[str, int] = {}
        rows_out: dict[str, int] = {}
        rows_unread: dict[str, dict[int, int]] = {}
        watermarks: dict[str, int] = {}
        busy_ms: dict[str, float] = {}
        full_ms: dict[str, float] = {}
        fixed_costs: dict[str, c.FixedCost] = {}
        counters = dict(self._counters)
        now_s = time.monotonic()
        for subtask in self._subtasks:
            full = subtask.full_s(now_s) * 1000
            if subtask.source is not None and (told := subtask.source.counters):
                counters[subtask.source.step] = {**counters.get(subtask.source.step, {}), **told}
            if (dearest := subtask.costs.report()) is not None:
                fixed_costs[dearest[0]] = dearest[1]
            for node in subtask.chain.nodes:
                rows_in[node.step] = rows_in.get(node.step, 0) + node.rows_in
                rows_out[node.step] = rows_out.get(node.step, 0) + node.rows_out
                busy_ms[node.step], full_ms[node.step] = node.busy_s * 1000, full
                for output, rows in node.rows_unread.items():
                    unread = rows_unread.setdefault(node.step, {})
                    unread[output] = unread.get(output, 0) + rows
            if subtask.chain.watermark != MIN_WATERMARK:
                watermarks[subtask.chain.nodes[0].step] = subtask.chain.watermark
        return c.Metrics(
            attempt=self.number,
            time_ms=(now_s - self._started_s) * 1000,
            rows_in=rows_in,
            rows_out=rows_out,
            watermarks=watermarks,
            counters=counters,
            busy_ms=busy_ms,
            backpressured_ms=full_ms,
            idle_ms=self.idle_s * 1000,
            region=self.region,
            rows_unread=rows_unread,
            fixed_costs=fixed_costs,
        )
