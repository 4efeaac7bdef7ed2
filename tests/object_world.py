"""One object store for the tests of a process, a place in it for each test, and a proxy before it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from object_proxy import Proxy

if TYPE_CHECKING:
    from servers.object_store import ObjectServer

BUCKET = "cutwater-tests"
_numbers = itertools.count()


@pytest.fixture(scope="session")
def object_server() -> Iterator[ObjectServer]:
    from servers.object_store import ObjectServer

    with ObjectServer(BUCKET) as started:
        yield started


@pytest.fixture
def bucket(object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """A URI below which nothing lies, for this process; others get the server's ``environment``."""
    for name, value in object_server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/place-{next(_numbers)}"


@pytest.fixture
def proxy(object_server: ObjectServer, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """What this process says to the store goes through it."""
    with Proxy(object_server.address) as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{made.address}")
        yield made


def in_environment(variables: Mapping[str, str]) -> Callable[[Any], None]:
    """Workers that have these variables."""
    found = dict(variables)

    def prepare(args: Any) -> None:
        os.environ.update(found)

    return prepare
