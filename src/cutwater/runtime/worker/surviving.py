"""How a part of a job goes on while others go back without it (R3, R4), and comes back beside others that went on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cutwater.errors import NondeterminismError, WireError
from cutwater.protocol.job.regions import Division, Place, partners
from cutwater.protocol.wire.handshake import Peer, Refusal
from cutwater.runtime.channels.connection import Connection
from cutwater.runtime.control import messages as c
from cutwater.runtime.control import reports as cr
from cutwater.runtime.control.determinant_news import DeterminantNews
from cutwater.runtime.worker.peers import ConnectedAttempt, PeerLost, place_of

if TYPE_CHECKING:
    from cutwater.plan.graph import PhysicalPlan
    from cutwater.runtime.channels.output import OutputChannel
    from cutwater.runtime.worker.wiring import Wiring
    from cutwater.runtime.worker.worker import Worker


@dataclass(frozen=True, slots=True)
class PeerArrived:
    """A replacement dialled."""

    connection: Connection


@dataclass(frozen=True, slots=True)
class _Expected:
    """Who fills a place that went back."""

    attempt: int
    incarnation: int
    checkpoint_id: int


class SurvivingAttempt(ConnectedAttempt):
    """An attempt of one region among others that it has connections with.

    With ``recovery="task"`` a region is what lives in one worker, with ``"upstream"`` it is what goes back at the loss
    of the same workers, and rows pass between regions.  When others go back, this one gives up the connections to them
    (``c.PeersReset``) and lets them dial anew; its channels go on over the new connection: outputs send again what they
    keep, inputs drop by number what they have.  Otherwise there are no connections between regions, and nothing here
    happens.

    Args:
        deploy: what the coordinator asks for.
        worker: the process it lives in.
        plan: what runs.
        division: of the job into regions.
    """

    def __init__(self, deploy: c.Deploy, worker: Worker, plan: PhysicalPlan, division: Division) -> None:
        recovery = worker.args.config.recovery
        self._plan, self._division, self._takes_upstream = plan, division, recovery == "upstream"
        self._alone = recovery in ("upstream", "task") and len(division.regions) > 1
        others = partners(division, recovery, (worker.args.slot, deploy.region))
        super().__init__(deploy, worker, deploy.region, others)
        self._wiring: Wiring | None = None
        self._restored = deploy.restore.checkpoint_id if deploy.restore is not None else 0
        self._order = DeterminantNews(self._restored) if worker.args.config.records_order else None
        """What the worker knows of determinant logs, if a recovery needs them (R0)."""
        self._numbers = list(deploy.attempts)
        self._survivors = frozenset(deploy.survivors)
        self._expected: dict[Place, _Expected] = {}
        """Replaced, never changed: threads of the data server look into it."""
        self._behind: list[tuple[Place, OutputChannel]] | None = None
        """Outputs that have not sent again what their receivers have; ``None``: the coordinator does not wait."""

    # ------------------------------------------------------------------------------------------------------- peers

    def _dials(self, other: Place) -> bool:
        return other in self._survivors or super()._dials(other)

    def _share(self, place: Place, connection: Connection) -> None:
        """Tell of determinant logs what concerns the other end, and hear what it knows."""
        if self._order is None:
            return
        division, (slot, region) = self._division, place
        own = frozenset(subtask for subtask in division.regions[region] if subtask[1] == slot)
        concern = None
        if self._takes_upstream:
            concern = frozenset(s for r in division.with_upstream({region}) for s in division.regions[r])
        connection.share(self._order.peer(place, own, concern))

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
            place: _Expected(turn.attempt, turn.incarnations[place[0]], turn.checkpoint_id) for place in gone
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

    def owe(self) -> None:
        """It is built beside survivors, who have rows that it will send again."""
        if self._survivors:
            assert self._wiring is not None
            self._behind = [(place, o) for place in sorted(self._survivors) for o in self._wiring.outputs_to(place)]

    @property
    def catches_up(self) -> bool:
        """The coordinator waits until it has sent again what survivors have."""
        return self._behind is not None

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
            self._worker.link.send(cr.CaughtUp(self.number, self.region))

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
