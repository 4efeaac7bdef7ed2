"""What counts as a hit."""

from __future__ import annotations

import os
import signal

from cutwater.chaos.storm import _kill_living
from cutwater.runtime.status import WorkerStatus


def test_only_a_kill_of_a_living_process_counts() -> None:
    pid = os.posix_spawn("/bin/sleep", ["sleep", "60"], os.environ)
    worker = WorkerStatus(slot=0, pid=pid, host="here")
    assert _kill_living(worker)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # dead, but nobody has asked after it
    assert not _kill_living(worker)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert not _kill_living(worker)
