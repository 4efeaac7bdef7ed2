"""A proxy before an object store: counts requests, and does to them what networks and servers do."""

from __future__ import annotations

import http.client
import http.server
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass(frozen=True)
class Request:
    """As a client sent it."""

    method: str
    target: str
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)

    @property
    def key(self) -> str:
        """Of the object; empty for the bucket."""
        return unquote(urlsplit(self.target).path).lstrip("/").partition("/")[2]

    @property
    def query(self) -> Mapping[str, list[str]]:
        return parse_qs(urlsplit(self.target).query, keep_blank_values=True)

    @property
    def kind(self) -> str:
        """What it asks for, in a word."""
        if self.method == "GET" and not self.key:
            return "list"
        if self.method == "POST" and "delete" in self.query:
            return "delete"
        if self.method == "POST":
            return "begin" if "uploads" in self.query else "complete"
        if self.method == "PUT":
            return "part" if "partNumber" in self.query else "put"
        if self.method == "DELETE" and "uploadId" in self.query:
            return "abort"
        return self.method.lower()


@dataclass(frozen=True)
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes


Cut: TypeAlias = None
"""The connection ends without an answer."""
Deed: TypeAlias = Callable[[Request, Callable[[Request], Answer]], "Answer | Cut"]


@dataclass
class Fault:
    """What befalls requests of a kind.

    Args:
        kind: see ``Request.kind``; empty for all.
        deed: what is done with one.
        key: only with this in its key.
        times: so many; the others pass.
    """

    kind: str
    deed: Deed
    key: str = ""
    times: int = 1_000_000

    def takes(self, request: Request) -> bool:
        if self.times <= 0 or self.kind not in ("", request.kind) or self.key not in request.key:
            return False
        self.times -= 1
        return True


class Proxy:
    """Listens on loopback, before a server there."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def add(self, kind: str, deed: Deed, *, key: str = "", times: int = 1_000_000) -> None:
        self.faults.append(Fault(kind, deed, key, times))

    def count(self, kind: str = "", key: str = "") -> int:
        """Requests so far."""
        return sum(1 for request in list(self.requests) if kind in ("", request.kind) and key in request.key)

    def answer(self, request: Request) -> Answer | Cut:
        with self._lock:
            self.requests.append(request)
            fault = next((fault for fault in self.faults if fault.takes(request)), None)
        return fault.deed(request, self.forward) if fault is not None else self.forward(request)

    def forward(self, request: Request, body_bytes: int | None = None) -> Answer:
        """What the server says; with ``body_bytes`` the connection to it ends after so many."""
        host, _, port = self._upstream.partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        try:
            connection.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers.items():
                if name.lower() not in ("connection", "transfer-encoding", "expect"):
                    connection.putheader(name, value)
            connection.endheaders()
            if body_bytes is not None:
                connection.send(request.body[:body_bytes])
                return Answer(500, [], b"")
            if request.body:
                connection.send(request.body)
            answer = connection.getresponse()
            return Answer(answer.status, answer.getheaders(), answer.read())
        finally:
            connection.close()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    proxy: Proxy
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that give up are what these tests are about."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _take(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(self.command, self.path, dict(self.headers.items()), body)
        try:
            answer = self.server.proxy.answer(request)  # type: ignore[attr-defined]
        except OSError:
            answer = None
        if answer is None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        length = next((v for k, v in answer.headers if k.lower() == "content-length"), str(len(answer.body)))
        lines = [f"HTTP/1.1 {answer.status} Told"]
        lines += [f"{k}: {v}" for k, v in answer.headers if k.lower() not in _OURS]
        lines += [f"Content-Length: {length}", "", ""]
        self.wfile.write("\r\n".join(lines).encode("latin-1") + (b"" if self.command == "HEAD" else answer.body))
        if self.command != "HEAD" and len(answer.body) < int(length):
            self.close_connection = True

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _take

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


_OURS = ("content-length", "transfer-encoding", "connection")


# ------------------------------------------------------------------------------------------------------------- deeds


def told(status: int, code: str, message: str = "As the test wants it") -> Deed:
    """The server says no."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    return lambda request, forward: Answer(status, [("Content-Type", "application/xml")], body)


def answer_lost(request: Request, forward: Callable[[Request], Answer]) -> Cut:
    """The server does it, and nobody hears of it."""
    forward(request)


def request_lost(request: Request, forward: Callable[[Request], Answer]) -> Cut:
    """The connection ends before the server has it."""


def slow(seconds: float) -> Deed:
    """The answer takes its time."""

    def deed(request: Request, forward: Callable[[Request], Answer]) -> Answer:
        answer = forward(request)
        time.sleep(seconds)
        return answer

    return deed


def late(seconds: float) -> Deed:
    """The connection ends, and the server does it afterwards."""

    def deed(request: Request, forward: Callable[[Request], Answer]) -> Cut:
        threading.Timer(seconds, forward, (request,)).start()

    return deed


def half_answered(request: Request, forward: Callable[[Request], Answer]) -> Answer:
    """The answer's body ends in the middle."""
    answer = forward(request)
    headers = [*answer.headers, ("Content-Length", str(len(answer.body)))]
    return Answer(answer.status, headers, answer.body[: len(answer.body) // 2])


class StaleListings:
    """Each listing says what was there at its first time."""

    def __init__(self) -> None:
        self._known: dict[str, Answer] = {}

    def __call__(self, request: Request, forward: Callable[[Request], Answer]) -> Answer:
        if request.target not in self._known:
            self._known[request.target] = forward(request)
        return self._known[request.target]
