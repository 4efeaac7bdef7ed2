"""Standard error of processes that Spark starts."""

from __future__ import annotations

import subprocess
import threading

from cutwater.ui.run import spark_output


def test_what_processes_started_inside_write_is_shown_even_later(capfd):
    shown, both = [], threading.Event()

    def show(line: str) -> None:
        shown.append(line)
        if len(shown) == 2:
            both.set()

    script = "echo one >&2; read go; echo two >&2"
    with spark_output(show):
        process = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE)
    subprocess.run(["sh", "-c", "echo outside >&2"], check=True)
    process.communicate(b"go\n")
    assert both.wait(10)
    assert shown == ["one", "two"]
    assert capfd.readouterr().err == "outside\n"
