"""A port that strangers may knock at: one thread listens, and hears everybody until he has proved the job's secret.

Nobody gets a thread, nor more memory than a handshake takes, before that.  Who sent nothing, or something that shows no
knowledge of the secret, is a *stranger*: there is room for a few, and a new one takes the place of the oldest.  Who has
knocked with the secret (``protocol.wire``) leaves them with his first bytes, which a worker sends as soon as
it is connected; so however many strangers come, they end each other, and never a worker.  A queue of the system takes
those that come faster than they are heard.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cutwater.errors import CutwaterError
from cutwater.protocol.wire import Peer, ServerHandshake
from cutwater.runtime.transport.sockets import JOIN_S, shut

_log = logging.getLogger(__name__)

_BACKLOG: Final = 4_096
"""Of connections that nobody heard yet; the system may have a lower limit (``net.core.somaxconn``)."""
_AT_ONCE: Final = 256
"""Connections accepted in a row before those that are heard get their turn."""
_KNOWN_PER_STRANGER: Final = 2
"""Room for those who knocked: many workers that start at once."""
_TELL_EVERY_S: Final = 60.0
"""Pause between two warnings that strangers crowd the port."""
_PAUSE_S: Final = 0.05
"""After something that cannot be helped."""
_OUT_OF_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_RESET: Final = struct.pack("ii", 1, 0)
"""Linger: a connection that is dropped leaves nothing behind, as thousands that wait for their end would be."""


@dataclass(slots=True)
class _Guest:
    """A connection that is not admitted yet."""

    sock: socket.socket
    handshake: ServerHandshake
    deadline_s: float


class Door:
    """Listens on an address.

    Args:
        host, port: where; port 0 takes a free one, see ``address``.
        handshake: makes this side's part of a handshake.
        admitted: gets each connection whose peer proved the secret and was accepted, in blocking mode; called from the
            thread of the door, which waits meanwhile.
        name: of the thread, and of the port in messages.
        timeout_s: for a handshake; a stranger has so long to knock, and as long again for the rest.
        strangers_max: so many are heard at a time.
        told: is told, now and then, that strangers crowd the port.
    """

    def __init__(
        self,
        host: str,
        port: int,
        handshake: Callable[[], ServerHandshake],
        admitted: Callable[[socket.socket, Peer], None],
        *,
        name: str,
        timeout_s: float = 5.0,
        strangers_max: int = 128,
        told: Callable[[str], None] = _log.warning,
    ) -> None:
        self._handshake, self._admitted, self._name, self._told = handshake, admitted, name, told
        self._timeout_s, self._strangers_max = timeout_s, strangers_max
        self._strangers: dict[socket.socket, _Guest] = {}
        """The oldest first, as in ``_known``."""
        self._known: dict[socket.socket, _Guest] = {}
        self._crowded = 0
        """Strangers that others took the place of since it was told."""
        self._told_s = float("-inf")
        self._closed = False
        self._listener = socket.create_server((host, port), backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening and drop who is not admitted yet.  Admitted connections live on."""
        self._closed = True
        shut(self._listener)  # wakes the thread
        if self._thread.ident is None:
            self._selector.close()
        elif self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)
        self._listener.close()

    # ------------------------------------------------------------------------------------------------- its thread

    def _run(self) -> None:
        while not self._closed:
            try:
                self._turn()
            except Exception:  # a port that nobody listens at would be the end of the job
                _log.exception("%s: listening failed, and goes on", self._name)
                time.sleep(_PAUSE_S)
        for guest in [*self._strangers.values(), *self._known.values()]:
            self._drop(guest)
        self._selector.close()

    def _turn(self) -> None:
        """Wait until somebody comes, speaks or is late."""
        for key, _ in self._selector.select(self._patience_s()):
            if key.fileobj is self._listener:
                self._accept()
            elif (guest := self._guest(key.fileobj)) is not None:
                self._hear(guest)
        self._end_late()

    def _guest(self, sock: object) -> _Guest | None:
        """Nobody, if his place was taken since the system said that he speaks."""
        assert isinstance(sock, socket.socket)
        return self._strangers.get(sock) or self._known.get(sock)

    def _patience_s(self) -> float | None:
        oldest = [next(iter(room.values())).deadline_s for room in (self._strangers, self._known) if room]
        return max(0.0, min(oldest) - time.monotonic()) if oldest else None

    def _end_late(self) -> None:
        now = time.monotonic()
        for room in (self._strangers, self._known):
            while room and (oldest := next(iter(room.values()))).deadline_s <= now:
                self._drop(oldest)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as e:
                if not self._closed and e.errno in _OUT_OF_FILES:
                    self._out_of_files(e)
                return
            sock.setblocking(False)
            guest = _Guest(sock, self._handshake(), time.monotonic() + self._timeout_s)
            self._strangers[sock] = guest
            self._selector.register(sock, selectors.EVENT_READ)
            self._hear(guest)  # a worker's knock is there already
            if len(self._strangers) > self._strangers_max:
                self._drop(next(iter(self._strangers.values())))
                self._crowd()

    def _out_of_files(self, error: OSError) -> None:
        """Those that prove nothing go first; without any, there is nothing to do but to wait."""
        _log.warning("%s: accepting a connection failed: %s", self._name, error)
        for guest in list(self._strangers.values()):
            self._drop(guest)
        time.sleep(_PAUSE_S)

    def _crowd(self) -> None:
        self._crowded += 1
        now = time.monotonic()
        if now - self._told_s >= _TELL_EVERY_S:
            count, self._crowded, self._told_s = self._crowded, 0, now
            self._told(
                f"strangers crowd port {self.address[1]} of {self.address[0]} ({self._name}): {count} connections that "
                f"showed no knowledge of the job's secret made way for newer ones, since more than "
                f"{self._strangers_max} came at a time; workers are let in all the same"
            )

    def _hear(self, guest: _Guest) -> None:
        handshake = guest.handshake
        try:
            while handshake.wanted:
                try:
                    data = guest.sock.recv(handshake.wanted)
                except BlockingIOError:
                    return
                if not data:
                    self._drop(guest)
                    return
                self._answer(guest, handshake.receive(data))
        except (CutwaterError, OSError) as e:
            _log.debug("%s: refused a connection: %s", self._name, e)
            if handshake.farewell:
                with contextlib.suppress(OSError):
                    guest.sock.send(handshake.farewell)
            self._drop(guest)
        except Exception:
            _log.exception("%s: a handshake failed", self._name)
            self._drop(guest)
        else:
            self._admit(guest)

    def _answer(self, guest: _Guest, answer: bytes) -> None:
        """Send; a handshake is smaller than any buffer, so who leaves no room for it is dropped."""
        if answer and guest.sock.send(answer) < len(answer):
            raise OSError("no room for an answer of the handshake")
        if guest.handshake.knocked and self._strangers.pop(guest.sock, None) is not None:
            guest.deadline_s = time.monotonic() + self._timeout_s
            self._known[guest.sock] = guest
            if len(self._known) > self._strangers_max * _KNOWN_PER_STRANGER:
                self._drop(next(iter(self._known.values())))

    def _admit(self, guest: _Guest) -> None:
        sock = guest.sock
        self._forget(guest)
        try:
            peer = guest.handshake.peer
            sock.setblocking(True)
            self._admitted(sock, peer)
        except CutwaterError as e:  # the peer has heard why
            _log.info("%s: refused a connection: %s", self._name, e)
            sock.close()
        except Exception:
            _log.exception("%s: accepting a connection failed", self._name)
            sock.close()

    def _forget(self, guest: _Guest) -> None:
        self._strangers.pop(guest.sock, None)
        self._known.pop(guest.sock, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(guest.sock)

    def _drop(self, guest: _Guest) -> None:
        self._forget(guest)
        with contextlib.suppress(OSError):
            guest.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        guest.sock.close()
