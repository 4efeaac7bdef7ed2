"""How a worker goes on while others go back without it (R4), and how it comes back beside others that went on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cutwater.errors import InvariantError, WireError
from cutwater.protocol.handshake import Peer, Refusal
from cutwater.protocol.regions import Region, slots_of
from cutwater.runtime import control as c
from cutwater.runtime.connections import Connection
from cutwater.runtime.order_news import OrderNews
from cutwater.runtime.peers import ConnectedAttempt, PeerLost

if TYPE_CHECKING:
    from cutwater.runtime.channels import OutputChannel
    from cutwater.runtime.wiring import Wiring
    from cutwater.runtime.worker import Worker

__all__ = ["PeerArrived", "SurvivingAttempt"]


@dataclass(frozen=True, slots=True)
class PeerArrived:
    """A replacement dialled."""

    connection: Connection


@dataclass(frozen=True, slots=True)
class _Expected:
    """Who fills a slot that went back."""

    attempt: int
    incarnation: int
    checkpoint_id: int


class SurvivingAttempt(ConnectedAttempt):
    """An attempt of one region among others that it has connections with.

    With ``recovery="task"`` a region is what lives in one worker, and rows pass between regions.  When others go back,
    this one gives up the connections to them (``c.Turn``) and lets them dial anew; its channels go on over the new
    connection: outputs send again what they keep, inputs drop by number what they have.  Otherwise there are no
    connections between regions, and nothing here happens.

    Args:
        deploy: what the coordinator asks for.
        worker: the process it lives in.
        regions: all of the job.
    """

    def __init__(self, deploy: c.Deploy, worker: Worker, regions: tuple[Region, ...]) -> None:
        self._alone = worker.args.config.recovery == "task" and len(regions) > 1
        slots = frozenset[int]().union(*map(slots_of, regions)) if self._alone else slots_of(regions[deploy.region])
        super().__init__(deploy, worker, deploy.region, slots)
        self._wiring: Wiring | None = None
        self._restored = deploy.restore.checkpoint_id if deploy.restore is not None else 0
        self._order = OrderNews(self._restored) if worker.args.config.records_order else None
        """What the worker knows of order logs, if a recovery needs them (R0)."""
        self._region_of = {slot: r for r, region in enumerate(regions) for slot in slots_of(region)}
        self._numbers = list(deploy.attempts)
        self._incarnations = list(deploy.incarnations)
        self._survivors = frozenset(deploy.survivors)
        self._expected: dict[int, _Expected] = {}
        """By slot; replaced, never changed: threads of the data server look into it."""
        self._behind: list[OutputChannel] | None = None
        """Outputs that have not sent again what their receivers have; ``None``: the coordinator does not wait."""

    # ------------------------------------------------------------------------------------------------------- peers

    def _dials(self, other: int) -> bool:
        return other in self._survivors or other > self._slot

    def _region_at(self, other: int) -> int:
        return self._region_of[other] if self._alone else self.region

    def check_peer(self, peer: Peer) -> Refusal | None:
        """Whether a dialling worker belongs to this attempt, or may replace one that did (any thread)."""
        if self.building or not self._alone:
            return super().check_peer(peer)
        expected = self._expected.get(peer.worker)
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

    def turn(self, turn: c.Turn) -> None:
        """Others go back: nothing of theirs is taken from now on but over new connections."""
        expected = dict(self._expected)
        for slot in turn.slots:
            old = self._connections.pop(slot, None)
            if old is not None:
                old.close()
            self._numbers[slot], self._incarnations[slot] = turn.attempt, turn.incarnations[slot]
            expected[slot] = _Expected(turn.attempt, turn.incarnations[slot], turn.checkpoint_id)
        if self._behind:  # what they had is lost with them
            self._behind = [channel for channel in self._behind if channel.key.target not in turn.slots]
        self._expected = expected

    def arrived(self, connection: Connection) -> None:
        """A replacement is there: go on with it.

        Raises:
            InvariantError: what it lacks is not kept.
        """
        slot = connection.peer.worker
        if self.check_peer(connection.peer) is not None or slot in self._connections:
            connection.close()
            return
        self._connections[slot] = connection
        wiring = self._wiring
        assert wiring is not None  # it was built
        if self._order is not None:
            connection.share(self._order)  # what is known goes first
        for receiver in wiring.inputs_from(slot):
            connection.take_over_input(receiver)
        for sender in wiring.outputs_to(slot):
            connection.take_over_output(sender, self._expected[slot].checkpoint_id)
        connection.start(self._lost)

    def peer_lost(self, lost: PeerLost) -> None:
        """The connection to another worker ended: if that one lives, one of the two goes back, all others run on.

        Raises:
            CutwaterError: this one goes back.
        """
        slot = lost.connection.peer.worker
        if self._connections.get(slot) is not lost.connection:
            return
        if not self._alone or not isinstance(lost.error, WireError):
            raise lost.error
        if self._slot < slot:  # the other end sees it, too
            self._worker.report(lost.error, self._numbers[slot], self._region_of[slot])

    # ------------------------------------------------------------------------------------------------ as replacement

    def owe(self) -> None:
        """It is built beside survivors, who have rows that it will send again."""
        if self._survivors:
            assert self._wiring is not None
            self._behind = [o for slot in sorted(self._survivors) for o in self._wiring.outputs_to(slot)]

    @property
    def catches_up(self) -> bool:
        """The coordinator waits until it has sent again what survivors have."""
        return self._behind is not None

    def tell_if_caught_up(self, following: bool) -> None:
        """No barrier may leave before the receivers have nothing that is still to be sent.

        Raises:
            InvariantError: an output has ended with fewer rows than its receiver has.

        Args:
            following: a subtask still takes its inputs in an order that others know of.
        """
        self._behind = [output for output in self._behind or () if self._owes(output)]
        if not self._behind and not following:
            self._behind = None
            self._worker.link.send(c.CaughtUp(self.number, self.region))

    def _owes(self, output: OutputChannel) -> bool:
        connection = self._connections.get(output.key.target)
        arrived = connection.arrived.get(output.key) if connection is not None else None
        if arrived is None:
            return True
        if output.ended and output.next_row < arrived[0]:
            raise InvariantError(
                f"{output.key}: {output.next_row} rows were made again of {arrived[0]} that had been sent",
                hint="A function of the dataflow gives other rows for the same input: choose recovery='region'.",
            )
        return output.next_row < arrived[0] or (arrived[1] and not output.ended)
