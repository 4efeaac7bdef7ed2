"""A stand-in for a schema registry, for tests: it speaks the calls of Confluent's REST interface that we use.

    with SchemaRegistry() as registry:
        id = registry.register("clicks-value", {"type": "record", ...})
        print(registry.address)

It keeps schemas in memory, and checks nothing about them; ``refuse`` lets the next ones be incompatible.  Those of
Protobuf are descriptors in base64, which it takes as a registry does; the text of a ``.proto`` file, which it gives
where nobody asks for ``format=serialized``, it makes up.
"""

from __future__ import annotations

import base64
import json
import re
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote

__all__ = ["SchemaRegistry"]

_CONTENT = "application/vnd.schemaregistry.v1+json"

_TEXT = 'syntax = "proto3";\nmessage Somebody { string name = 1; }\n'


class _Refused(Exception):
    def __init__(self, status: int, code: int, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class SchemaRegistry:
    """Listens on loopback.

    Args:
        user: ``"name:password"``, which a request must have; ``None``: nobody is asked.
        tls: with the certificate of an authority of its own, which goes into this file.
    """

    def __init__(self, user: str | None = None, *, tls: str | None = None) -> None:
        self.user = user
        self.asked: list[str] = []
        """Method and path of each request."""
        self.refuse = False
        """Answer that a schema is incompatible."""
        self.serializes = True
        """Heed ``format=serialized``; some registries do not."""
        self.broken = 0
        """So many requests are answered with 503."""
        self._schemas: list[dict[str, Any]] = []
        self._subjects: dict[str, list[int]] = {}
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.port = self._server.server_port
        self.address = f"http{'' if tls is None else 's'}://127.0.0.1:{self.port}"
        if tls is not None:
            self._secure(tls)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _secure(self, authority_file: str) -> None:
        import trustme

        authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.cert_pem.write_to_path(authority_file)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    def register(self, subject: str, schema: object, **more: Any) -> int:
        """The id of a schema, a new one if it is not known."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        with self._lock:
            entry = {"schema": text, **more}
            if entry not in self._schemas:
                self._schemas.append(entry)
            id = self._schemas.index(entry) + 1
            versions = self._subjects.setdefault(subject, [])
            if id not in versions:
                versions.append(id)
            return id

    def answer(self, path: str, body: Any) -> dict[str, Any]:
        """What a request gets."""
        path, _, query = path.partition("?")
        for pattern, make in self._calls().items():
            found = re.fullmatch(pattern, path)
            if found and (body is not None) == pattern.endswith("versions"):
                made = make(*(unquote(part) for part in found.groups()), *([body] if body is not None else []))
                serialized = self.serializes and query == "format=serialized"
                if made.get("schemaType") == "PROTOBUF" and not serialized:
                    return {**made, "schema": _TEXT}
                return made
        raise _Refused(404, 404, "HTTP 404 Not Found")

    def _calls(self) -> dict[str, Callable[..., dict[str, Any]]]:
        return {
            r"/schemas/ids/(\d+)": self._schema,
            r"/subjects/([^/]+)/versions/(\w+)": self._version,
            r"/subjects/([^/]+)/versions": self._registered,
        }

    def _schema(self, id: str) -> dict[str, Any]:
        if int(id) >= 2**31:
            raise _Refused(404, 404, "HTTP 404 Not Found")
        if not 0 < int(id) <= len(self._schemas):
            raise _Refused(404, 40403, "Schema not found")
        return self._schemas[int(id) - 1]

    def _version(self, subject: str, version: str) -> dict[str, Any]:
        versions = self._subjects.get(subject)
        if not versions:
            raise _Refused(404, 40401, f"Subject '{subject}' not found.")
        number = len(versions) if version == "latest" else int(version)
        if not 0 < number <= len(versions):
            raise _Refused(404, 40402, f"Version {version} not found.")
        id = versions[number - 1]
        return {"subject": subject, "version": number, "id": id, **self._schemas[id - 1]}

    def _registered(self, subject: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.refuse:
            raise _Refused(409, 409, "Schema being registered is incompatible with an earlier schema")
        return {"id": self.register(subject, **body)}

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _handler(registry: SchemaRegistry) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: Any) -> None:
            registry.asked.append(f"{self.command} {self.path}")
            try:
                self._check()
                self._send(200, registry.answer(self.path, body))
            except _Refused as refused:
                self._send(refused.status, {"error_code": refused.code, "message": refused.message})

        def _check(self) -> None:
            if registry.broken:
                registry.broken -= 1
                raise _Refused(503, 50301, "not now")
            if registry.user is not None:
                wanted = f"Basic {base64.b64encode(registry.user.encode()).decode()}"
                if self.headers.get("Authorization") != wanted:
                    raise _Refused(401, 401, "Unauthorized")

        def _send(self, status: int, body: object) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", _CONTENT)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: a test asks ``asked``."""

    return Handler
