"""What is decoded can be decoded in several threads at once, also for the first time in a process."""

from __future__ import annotations

import ast
import gc
import importlib
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, get_args

import msgspec

from cutwater.data.decoding import prepare
from source_tree import SOURCE, Module, modules

ELSEWHERE = {
    (
        "cutwater.process_networks.messages",
        "kind",
    ): "a user's class; building the network decodes it once, in one thread",
    ("cutwater.connectors.staging", "kind"): "what the sinks that call it name, which is looked at there",
    ("cutwater.runtime.driver.requests", "type"): "one of the module's three, which are prepared",
}


def decoded(module: Module) -> Iterator[str]:
    """The types that a module has msgspec decode or convert to, as it writes them."""
    if not re.search(r"msgspec\.(json\.decode|msgpack\.decode|convert)|\bconverted\(", module.text):
        return
    for call in (node for node in ast.walk(module.tree) if isinstance(node, ast.Call)):
        match ast.unparse(call.func):
            case "msgspec.json.decode" | "msgspec.msgpack.decode":
                yield from (ast.unparse(k.value) for k in call.keywords if k.arg == "type")
            case "msgspec.convert":
                yield ast.unparse(call.args[1])
            case "converted" if module.name.startswith("cutwater.connectors."):
                yield ast.unparse(call.args[1])
            case _:
                pass


def unprepared(kind: Any) -> Iterator[str]:
    """Structs of which msgspec does not know the fields yet."""
    known = any(type(held).__name__ == "StructInfo" for held in gc.get_referents(kind))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and not known:
        yield kind.__name__
    for part in get_args(kind):
        yield from unprepared(part)


def unprepared_in(module: Module) -> list[str]:
    written = [t for t in decoded(module) if (module.name, t) not in ELSEWHERE]
    if not written:
        return []
    namespace = dict(vars(importlib.import_module(module.name)))
    for lazy in (i.module.rpartition(".") for i in module.imports if i.lazy and i.module.endswith(tuple(written))):
        namespace[lazy[2]] = getattr(importlib.import_module(lazy[0]), lazy[2])
    return [f"{module.name}: {name}" for text in written for name in unprepared(eval(text, namespace))]


def in_new_process(code: str) -> str:
    """What it prints; other tests of this process have decoded much already."""
    path = os.pathsep.join([str(SOURCE), os.path.dirname(__file__), str(SOURCE.parent / "tests")])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def test_types_are_worked_out_when_their_module_is_imported() -> None:
    found = in_new_process(
        """
        from test_prepared_types import unprepared_in
        from source_tree import modules

        print(*(line for module in modules().values() for line in unprepared_in(module)), sep="\\n")
        """
    )
    assert found.strip() == ""


def test_the_check_sees_types_and_whether_they_are_prepared() -> None:
    class Inner(msgspec.Struct):
        x: int

    assert list(unprepared(Inner | list[Inner])) == ["Inner", "Inner"]
    prepare(Inner)
    assert list(unprepared(Inner | list[Inner])) == []
    assert "Manifest" in decoded(modules()["cutwater.storage.snapshot.segment_files"])
    assert "PartHandle | EndHandle" in decoded(modules()["cutwater.connectors.files.part_commit"])


def test_two_threads_may_be_the_first_to_read_a_manifest() -> None:
    """As when two regions of a worker are restored side by side; without ``prepare`` nearly every run has a crash."""
    codes = in_new_process(
        """
        import os, sys, threading
        import msgspec
        from cutwater.storage.snapshot.manifest import ChannelRecord, Manifest, SubtaskRecord

        subtask = SubtaskRecord(0, 0, 1, "aligned", inputs=[ChannelRecord(0, 0, 0, 7, 0)])
        text = msgspec.json.encode(Manifest("job", "uid", 1, 1, "aligned", 128, 1, 0, 0, [], [subtask], []))
        sys.setswitchinterval(1e-6)

        def read(gate):
            gate.wait()
            msgspec.json.decode(text, type=Manifest)

        for _ in range(150):
            child = os.fork()
            if child == 0:
                gate = threading.Barrier(2)
                threads = [threading.Thread(target=read, args=(gate,)) for _ in range(2)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                os._exit(0)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    assert set(codes.split()) == {"0"}
