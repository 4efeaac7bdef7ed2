"""Scenario scripts: plain text, a command per line, what it must answer below it.

    subtask sum a b [protocol=aligned] [back=b] [last=7]     a new machine
    coordinator m n [sources=m] [interval_ms=10] ...         a new coordinator
    sum: BarrierTaken a 1                                    an event, fields in order (or name=value)

Run with REWRITE=1 to write the answers of today into the scripts; then read the difference.
"""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cutwater.config import JobConfig
from cutwater.errors import InvariantError
from cutwater.protocol import messages
from cutwater.protocol.checkpoint import messages as cm
from cutwater.protocol.checkpoint.coordinator import CheckpointCoordinator
from cutwater.protocol.protocols import NETWORK, PROTOCOLS, CheckpointKind, FailureReason
from cutwater.protocol.subtask.machine import SubtaskMachine

ROWS = PROTOCOLS | {"network": NETWORK}
SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.txt"))


def value(text: str) -> Any:
    """A number, a truth value, a kind, a reason, or the text itself."""
    for parse in (int, float, {"true": True, "false": False}.__getitem__, CheckpointKind, FailureReason.of):
        try:
            return parse(text)
        except (ValueError, KeyError):
            continue
    return text


def show(effect: Any) -> str:
    def short(v: Any) -> str:
        if isinstance(v, FailureReason):
            return v.code
        if isinstance(v, enum.Enum):
            return str(v.value)
        return "+".join(map(str, v)) if isinstance(v, tuple) else str(v)

    fields = [(f.name, v) for f in msgspec.structs.fields(effect) if (v := getattr(effect, f.name)) != f.default]
    return " ".join([type(effect).__name__, *(f"{name}={short(v)}" for name, v in fields if v not in ("", None))])


class Stage:
    def __init__(self) -> None:
        self.machines: dict[str, SubtaskMachine | CheckpointCoordinator] = {}

    def perform(self, line: str) -> list[str]:
        name, colon, rest = line.partition(": ")
        if not colon:
            return self.create(line.split())
        machine, (kind, *words) = self.machines[name], rest.split()
        plain = [value(w) for w in words if "=" not in w]
        named = {k: value(v) for k, v in (w.split("=") for w in words if "=" in w)}
        try:
            event = getattr(messages, kind, None) or getattr(cm, kind)
            effects = machine.handle(event(*plain, **named))
        except InvariantError as error:
            return ["  error: " + str(error).splitlines()[0]]
        machine.validate()
        state = self.state(machine)
        return [f"  {show(e)}" for e in effects] + ([f"  -- {state}"] if state else [])

    def create(self, words: list[str]) -> list[str]:
        what, name, *rest = words
        names = [w for w in rest if "=" not in w]
        options = dict(w.split("=") for w in rest if "=" in w)
        if what == "subtask":
            self.machines[name] = SubtaskMachine(
                name,
                names,
                protocol=ROWS[options.get("protocol", "aligned")],
                back_edges=frozenset(options["back"].split(",")) if "back" in options else frozenset(),
                last_checkpoint_id=int(options.get("last", 0)),
            )
        else:
            sources = frozenset(options.pop("sources", names[0]).split(","))
            first_id = int(options.pop("first_id", 0))
            settings = JobConfig(**{k: value(v) for k, v in options.items()})
            self.machines[name] = CheckpointCoordinator(settings, frozenset(names), sources, first_id)
        return []

    def state(self, machine: SubtaskMachine | CheckpointCoordinator) -> str:
        if isinstance(machine, CheckpointCoordinator):
            pending = [f"{p.checkpoint_id} {p.stage.value}" for p in machine.pending]
            due = machine.next_due_ms
            return ", ".join([*pending, *([f"due {due:g}"] if due is not None else [])])
        pending = [f"{id} {stage.value}" for id, stage in machine.pending.items()]
        blocked = [f"blocked {'+'.join(map(str, machine.blocked))}"] if machine.blocked else []
        phase = [machine.phase.value] if machine.phase.value != "running" else []
        return ", ".join([*phase, *pending, *blocked])


def run(text: str) -> str:
    """The script with today's answers."""
    stage, lines = Stage(), list[str]()
    for line in text.splitlines():
        if line.startswith("  "):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            lines += stage.perform(line)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_script(path):
    before = path.read_text()
    after = run(before)
    if os.environ.get("REWRITE"):
        path.write_text(after)
    else:
        assert after == before


def test_there_are_scripts_and_a_wrong_answer_is_seen():
    assert len(SCRIPTS) >= 12
    assert run("subtask s a\ns: BarrierTaken a 1\n  Freeze checkpoint_id=2 final=False\n") == (
        "subtask s a\ns: BarrierTaken a 1\n  Freeze checkpoint_id=1 final=False\n"
        "  BroadcastBarrier checkpoint_id=1 final=False\n  -- 1 writing\n"
    )
