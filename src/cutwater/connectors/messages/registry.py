"""A schema registry, which knows by its id the schema that a message was written with."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import quote, urlsplit

from cutwater.connectors.secrets import check_named, secret_at
from cutwater.errors import ConfigError, StorageError, did_you_mean

_USER = "basic.auth.user.info"
_AUTHORITY = "ssl.ca.location"
_OPTIONS = (_USER, _AUTHORITY)
_TIMEOUT_S = 10.0
_WAITS_S = (0.2, 1.0, 0.0)
"""After each try; the registry may be about to restart."""
_MOST_BYTES = 16 << 20
_MOST_ID = 2**31 - 1
"""Registries take a larger one for no id at all, and not for one that they do not know."""
_UNKNOWN = (40401, 40402, 40403)
"""What a registry says of a subject, a version, and a schema that there is not; another 404 is not a registry's."""
_CONTENT = "application/vnd.schemaregistry.v1+json"


class Referenced(NamedTuple):
    """A schema that another one uses."""

    name: str
    """By which the other one knows it."""
    text: str


class Registered(NamedTuple):
    """A schema as the registry has it."""

    id: int
    kind: str
    """``"AVRO"``, ``"PROTOBUF"``, ``"JSON"``."""
    text: str
    references: tuple[Referenced, ...]
    """Those that it uses, each before it is used."""


@dataclass(frozen=True)
class Registry:
    """Where a registry is, and what it is told.  A picklable value that holds no secret.

    Args:
        url: of its REST interface.
        options: ``basic.auth.user.info``, which says where ``user:password`` is: ``"env:NAME"`` or ``"file:/path"``;
            ``ssl.ca.location``, a file with certificates of authorities.

    Raises:
        ConfigError: no such address or option, or a password in plain.

    >>> Registry.of("http://localhost:8081", {"basic.auth.user.info": "me:hunter2"})
    Traceback (most recent call last):
    cutwater.errors.ConfigError: option 'basic.auth.user.info' of the schema registry holds a secret...
    """

    url: str
    options: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, url: str, options: Mapping[str, str] | None) -> Registry:
        """The registry, its options checked."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("the address of a schema registry begins with http:// or https://", hint=_EXAMPLE)
        if parts.username is not None or parts.password is not None:
            raise ConfigError(
                "the address of a schema registry must not hold a password, which would travel with the plan",
                hint=f"Say where it is: options={{{_USER!r}: 'env:NAME'}}, a variable with user:password.",
            )
        for name, value in (options or {}).items():
            if name not in _OPTIONS:
                raise ConfigError(f"a schema registry has no option {name!r}", hint=did_you_mean(name, _OPTIONS))
            if name == _USER:
                check_named(f"option {name!r} of the schema registry", name, value)
        return cls(url.rstrip("/"), tuple(sorted((options or {}).items())))

    def latest(self, subject: str, form: str = "") -> Registered | None:
        """The newest schema of a subject; ``None``: it has none.

        Args:
            form: of the text, as the registry calls it: ``"serialized"``.

        Raises:
            StorageError: the registry does not answer, or refuses.
        """
        found = self._asked(f"/subjects/{quote(subject, safe='')}/versions/latest{_query(form)}", ("id", "schema"))
        return None if found is None else self._registered(int(found["id"]), found, form)

    def schema(self, id: int, form: str = "") -> Registered | None:
        """The schema of an id; ``None``: the registry says that there is none.

        Raises:
            StorageError: the registry does not answer, or refuses.
        """
        found = self._asked(f"/schemas/ids/{id}{_query(form)}", ("schema",)) if id <= _MOST_ID else None
        return None if found is None else self._registered(id, found, form)

    def register(self, subject: str, text: str, kind: str = "AVRO") -> int:
        """The id of a schema, which becomes the newest of the subject if it is not there.

        Raises:
            StorageError: the registry does not answer, or refuses the schema.
        """
        path = f"/subjects/{quote(subject, safe='')}/versions"
        body = {"schema": text} if kind == "AVRO" else {"schema": text, "schemaType": kind}
        found = self._asked(path, ("id",), body)
        if found is None:
            raise self._error(f"there is no {path}")
        return int(found["id"])

    def _registered(self, id: int, found: Mapping[str, Any], form: str) -> Registered:
        """A schema with those that it refers to."""
        texts: dict[tuple[str, int], Referenced] = {}

        def collect(holder: Mapping[str, Any]) -> None:
            for one in holder.get("references") or ():
                place = (one["subject"], int(one["version"]))
                if place not in texts:
                    texts[place] = Referenced("", "")  # seen, so that a circle ends
                    path = f"/subjects/{quote(place[0], safe='')}/versions/{place[1]}{_query(form)}"
                    other = self._asked(path, ("schema",))
                    if other is None:
                        raise self._error(
                            f"it knows no version {place[1]} of subject {place[0]!r}, which a schema uses"
                        )
                    collect(other)
                    del texts[place]
                    texts[place] = Referenced(str(one.get("name", "")), str(other["schema"]))

        collect(found)
        return Registered(id, str(found.get("schemaType", "AVRO")), str(found["schema"]), tuple(texts.values()))

    # ------------------------------------------------------------------------------------------------------- asking

    def _asked(self, path: str, keys: tuple[str, ...], body: object = None) -> Any:
        """The answer, which has such keys; ``None``: the registry says that there is no such thing."""
        said = ""
        for wait_s in _WAITS_S:
            try:
                found = self._once(path, body)
            except _Away as away:
                said = str(away)
                time.sleep(wait_s)
                continue
            if found is not None and not (isinstance(found, dict) and found.keys() >= set(keys)):
                raise self._error(f"what answers {path} is no schema registry")
            return found
        raise self._error(said)

    def _once(self, path: str, body: object) -> Any:
        request = urllib.request.Request(self.url + path, headers={"Accept": f"{_CONTENT}, application/json"})
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", _CONTENT)
        options = dict(self.options)
        if _USER in options:
            user = secret_at(f"option {_USER!r} of the schema registry", options[_USER])
            # Not sent on to where the registry may redirect to.
            request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(user.encode()).decode()}")
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=self._context(options)) as answer:
                return _json(answer.read(_MOST_BYTES)) or {}
        except urllib.error.HTTPError as error:
            return self._refused(path, error)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise _Away(f"it does not answer: {getattr(error, 'reason', error)}") from None

    def _context(self, options: Mapping[str, str]) -> ssl.SSLContext | None:
        if not self.url.startswith("https"):
            return None
        try:
            return ssl.create_default_context(cafile=options.get(_AUTHORITY))
        except OSError as error:
            raise ConfigError(f"option {_AUTHORITY!r} of the schema registry: {error}") from None

    def _refused(self, path: str, error: urllib.error.HTTPError) -> None:
        try:
            said = _json(error.read(_MOST_BYTES))
        except OSError:
            said = None
        finally:
            error.close()
        code, text = (said.get("error_code"), said.get("message")) if isinstance(said, dict) else (None, error.reason)
        if error.code == 404 and code in _UNKNOWN:
            return
        if error.code in (401, 403):
            raise StorageError(
                f"the schema registry at {self.url} refuses {path}: {error.code} {error.reason}",
                hint=f"Look at {_USER!r} in its options.",
            )
        if error.code >= 500 or error.code == 429:
            raise _Away(f"{error.code} {text}")
        if error.code in (409, 422):
            raise StorageError(
                f"the schema registry at {self.url} refuses the schema for {path}: {text}",
                hint="Readers of the earlier schema could not read it. Change it so that they can, for example by "
                "defaults for new fields, or the compatibility of the subject.",
            )
        raise self._error(f"{error.code} {text} for {path}")

    def _error(self, said: str) -> StorageError:
        return StorageError(
            f"the schema registry at {self.url}: {said}",
            hint="Is the address right, and reachable from here? Once it answers, the job goes on from its last "
            "checkpoint.",
        )


class _Away(Exception):
    """The registry may answer if it is asked again."""


T = TypeVar("T")


REFUSED_S = 30.0
"""So long an id counts as unknown before the registry is asked again: its schema may be registered meanwhile."""
_MOST_REFUSED = 10_000


class KnownSchemas(Generic[T]):
    """The schemas of a registry by their ids, each asked for once in a process; what it does not know, now and then.

    Args:
        registry: whom to ask.
        make: what becomes of a schema, or why nothing does.
        form: see ``Registry.latest``.
    """

    _known: dict[tuple[Registry, int, str], Any] = {}
    _refused: dict[tuple[Registry, int, str], tuple[float, str]] = {}
    """Until when, and why."""
    _lock = threading.Lock()

    def __init__(self, registry: Registry, make: Callable[[Registered], T | str], form: str = "") -> None:
        self._registry, self._make, self._form = registry, make, form

    def __call__(self, id: int) -> T | str:
        """The schema of an id, or why there is none.

        Raises:
            StorageError: the registry does not answer, or refuses.
        """
        key, now_s = (self._registry, id, self._form), time.monotonic()
        with self._lock:
            known = self._known.get(key)
            until_s, why = self._refused.get(key, (0.0, ""))
        if known is not None:
            return known
        if now_s < until_s:
            return why
        made = self._asked(id)
        with self._lock:
            if not isinstance(made, str):
                self._known[key] = made
                self._refused.pop(key, None)
            else:
                if len(self._refused) >= _MOST_REFUSED:  # messages of another kind, with a zero byte in front
                    self._refused.clear()
                self._refused[key] = now_s + REFUSED_S, made
        return made

    def _asked(self, id: int) -> T | str:
        found = self._registry.schema(id, self._form)
        if found is None:
            return f"the schema registry at {self._registry.url} knows no schema {id}"
        return self._make(found)


_EXAMPLE = "Write for example registry='http://localhost:8081'."


def _query(form: str) -> str:
    return f"?format={quote(form, safe='')}" if form else ""


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None
