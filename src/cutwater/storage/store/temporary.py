"""Names of temporary files, by which the next process knows whether their writer still lives."""

from __future__ import annotations

import os
import socket
import time
import uuid

import xxhash

TEMP_PREFIX = ".cw-tmp-"
_STALE_S = 24 * 3600.0


def temp_tag() -> str:
    """How the names of this process's temporary files begin."""
    return f"{TEMP_PREFIX}{_pid_space()}-{os.getpid()}-{uuid.uuid4().hex[:8]}-"


def _pid_space() -> str:
    """Names the host and process-id name space in which a process id means something."""
    try:
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        space = 0
    return xxhash.xxh32_hexdigest(f"{socket.gethostname()}/{space}".encode())


def is_abandoned(name: str, folder: int) -> bool:
    """Whether the writer of a temporary file in a folder is dead or, on another host, has been silent for a day."""
    space, _, rest = name.removeprefix(TEMP_PREFIX).partition("-")
    pid = rest.partition("-")[0]
    if space == _pid_space() and pid.isdigit():
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
    try:
        return time.time() - os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime > _STALE_S
    except FileNotFoundError:
        return False
