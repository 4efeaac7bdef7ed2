"""Object stores on this machine that speak S3: SeaweedFS, which keeps conditions, and rclone, which ignores them.

with ObjectServer("data") as server:
    os.environ.update(server.environment)
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

__all__ = ["KEY", "SECRET", "ObjectServer", "ObjectServerError"]

KEY, SECRET = "cutwater-test", "open-sesame-open-sesame"
"""Credentials of the servers, on loopback only."""

_START_S = 60.0
_PORTS = ("s3.port", "master.port", "volume.port", "filer.port")
_GRPC_PORTS = ("s3.port.grpc", "master.port.grpc", "volume.port.grpc", "filer.port.grpc", "admin.port")


class ObjectServerError(Exception):
    """The server does not start; says what its log says last."""


def _program(name: str) -> str:
    """Programs of wheels lie beside the interpreter."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ObjectServerError(f"no program {name}: install the development dependencies")
    return found


def _free_ports(count: int) -> list[int]:
    """Low ones: the server adds 10,000 to some."""
    found = set[int]()
    while len(found) < count:
        port = random.randrange(20_000, 50_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.add(port)
    return sorted(found)


class ObjectServer:
    """One server on loopback, with a folder of its own.

    Args:
        bucket: is there.
        kind: which.

    Raises:
        ObjectServerError: it does not start.
    """

    def __init__(self, bucket: str, kind: Literal["seaweedfs", "rclone"] = "seaweedfs") -> None:
        self._bucket, self._kind = bucket, kind
        self._folder = Path(tempfile.mkdtemp(prefix=f"{kind}-"))
        (self._folder / "data" / (bucket if kind == "rclone" else "")).mkdir(parents=True)
        ports = _free_ports(len(_PORTS) + len(_GRPC_PORTS))
        self.port, self._ports = ports[0], dict(zip([*_PORTS, *_GRPC_PORTS], ports, strict=True))
        self._ports["admin.port.grpc"] = self._ports["admin.port"] + 10_000  # where its worker looks for it
        self.address = f"127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables with which a client finds it."""
        return {
            "AWS_ENDPOINT_URL": f"http://{self.address}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }

    def _command(self) -> list[str]:
        data = str(self._folder / "data")
        if self._kind == "rclone":
            login = f"{KEY},{SECRET}"
            return [_program("rclone"), "serve", "s3", "--addr", self.address, "--auth-key", login, data]
        ports = [f"-{name}={port}" for name, port in self._ports.items()]
        off = ["-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
        buckets = [f"-bucket={self._bucket}", "-s3.autoCreateBucket=false"]
        where = [f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        return [_program("weed"), "mini", *where, *ports, *off, *buckets]

    def start(self) -> None:
        """Start it, again after ``kill`` with what it had stored.

        Raises:
            ObjectServerError: it does not.
        """
        login = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        with open(self._folder / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdout=log,
                stderr=log,
                env={**os.environ, **login, "TMPDIR": str(self._folder)},
                cwd=self._folder,
                start_new_session=True,
            )
        ends = time.monotonic() + _START_S
        while time.monotonic() < ends and self._process.poll() is None:
            if self._answers():
                return
            time.sleep(0.05)
        told = (self._folder / "server.log").read_text(errors="replace")[-2000:]
        self.close()
        raise ObjectServerError(told)

    def _answers(self) -> bool:
        """True once the bucket is there, which comes after the port."""
        import obstore
        from obstore.exceptions import BaseError
        from obstore.store import S3Store

        login = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET, "aws_region": "us-east-1"}
        store = S3Store(
            self._bucket,
            endpoint=f"http://{self.address}",
            config=login,
            client_options={"allow_http": True, "timeout": "2s"},
            retry_config={"max_retries": 0},
        )
        try:
            obstore.list_with_delimiter(store)
        except (BaseError, FileNotFoundError):
            return False
        return True

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """SIGSTOP, until ``go_on``."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """End it and remove what it made."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        for port in self._ports.values():
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
