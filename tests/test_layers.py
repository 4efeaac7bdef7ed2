"""Imports go downward only, and the core knows nothing of the world."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

import pytest

from source_tree import PACKAGE, ROOT, SOURCE, Import, Module, module_of, modules

# From the bottom up; rooms of one line never import each other.
LAYERS = (
    ("errors",),
    ("entry_points",),
    ("data",),
    ("config",),
    ("trace",),
    ("protocol",),
    ("state",),
    ("storage",),
    ("operators",),
    ("connectors",),
    ("testing",),
    ("plan",),
    ("state_reader",),
    ("runtime", "sim"),
    ("spark",),
    ("process_networks",),
    ("api",),
    ("network",),
    ("chaos",),
    ("ui",),
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

PYSPARK_HOMES = {
    "cutwater.runtime.spark_host": "the one host on Spark; tells Spark's pickler which modules to send whole",
    "cutwater.runtime.daemon": "is Spark's worker daemon, with the data path loaded before it forks",
    "cutwater.operators.stateful_processor.spark_types": "makes the rows and schemas that a StatefulProcessor knows",
    "cutwater.connectors.data_source.spark_api": "makes what Python data sources are given and give; in functions only",
    "cutwater.testing.shipping": "sends a connector as Spark's pickler does; imports pyspark inside a function only",
    "cutwater.connectors.spark_source": "stages DataFrames; imports pyspark inside functions only",
}

PROTOCOL_MAY_IMPORT = {"msgspec"} | (
    set(sys.stdlib_module_names)
    - {"asyncio", "threading", "multiprocessing", "concurrent", "socket", "select", "selectors", "ssl", "subprocess"}
    - {"time", "datetime", "random", "secrets", "os", "io", "pathlib", "tempfile", "shutil", "logging", "signal"}
    - {"pickle", "urllib", "http", "queue", "sched"}
)
"""What the core may use of the world: nothing that reads a clock, makes chance, waits, or touches a file."""

PROTOCOL_EXCEPTIONS = {
    ("cutwater.protocol.wire", "secrets"): "a nonce comes from the operating system, never from a seed",
    ("cutwater.protocol.job.restart_budget", "random"): "takes a seeded random.Random from outside",
}

UNSAFE = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}


def upward(module: Module) -> Iterator[str]:
    """Imports that go up, or across to a room of the same line."""
    for i in internal(module):
        room = i.module.split(".")[1]
        if room == module.room:
            continue
        if module.room == "":
            if not i.checking:
                yield f"{module.name}:{i.line} imports {i.module} although the package itself imports nothing"
        elif LEVEL[room] >= LEVEL[module.room]:
            yield f"{module.name}:{i.line} imports {i.module}: {module.room} lies not above {room}"


def internal(module: Module) -> list[Import]:
    """Imports from other rooms; the version of the package may be asked for from anywhere."""
    return [i for i in module.imports if i.module.startswith("cutwater.") and i.module != "cutwater.__version__"]


def spark_outside_its_home(module: Module) -> Iterator[str]:
    for i in module.imports:
        if i.module.split(".")[0] in ("pyspark", "py4j") and not i.checking:
            at_home = module.room == "spark" or module.name in PYSPARK_HOMES
            if not at_home or (module.room == "connectors" and not i.lazy):
                yield f"{module.name}:{i.line} imports {i.module}"


def world_in_the_core(module: Module) -> Iterator[str]:
    if module.room != "protocol":
        return
    for i in module.imports:
        top = i.module.split(".")[0]
        known = top in PROTOCOL_MAY_IMPORT or top == "cutwater"
        if not known and not i.checking and (module.name, top) not in PROTOCOL_EXCEPTIONS:
            yield f"{module.name}:{i.line} imports {i.module}"


def unsafe_formats(module: Module) -> Iterator[str]:
    return (f"{module.name}:{i.line} imports {i.module}" for i in module.imports if i.module.split(".")[0] in UNSAFE)


RULES = {
    "imports go downward": upward,
    "only the Spark host knows Spark": spark_outside_its_home,
    "the core knows no world": world_in_the_core,
    "nothing is pickled": unsafe_formats,
}

BREACHES = {
    "imports go downward": ("cutwater.state.x", "from cutwater.operators import base"),
    "only the Spark host knows Spark": ("cutwater.api.x", "def f():\n    import pyspark.sql"),
    "the core knows no world": ("cutwater.protocol.x", "from time import monotonic"),
    "nothing is pickled": ("cutwater.storage.x", "def f():\n    from pickle import dumps"),
}


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule):
    assert [breach for module in modules().values() for breach in RULES[rule](module)] == []


@pytest.mark.parametrize("rule", RULES)
def test_a_breach_of_the_rule_is_seen(rule):
    name, text = BREACHES[rule]
    assert list(RULES[rule](module_of(text, name)))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cutwater.sim.x", "import cutwater.runtime.worker.worker"),
        ("cutwater.runtime.x", "from cutwater.sim import world"),
        ("cutwater.protocol.x", "if True:\n    from cutwater.state.keys import key_groups"),
        ("cutwater.protocol.x", "from ..state import keys"),
        ("cutwater.plan.x", "def f():\n    from cutwater.runtime import worker"),
        ("cutwater", "import cutwater.errors"),
    ],
)
def test_other_ways_up_are_seen(name, text):
    assert list(upward(module_of(text, name)))


def test_every_room_has_a_line():
    rooms = {m.room for m in modules().values()} - {""}
    assert rooms <= set(LEVEL)


def test_no_exception_is_left_over():
    """An exception that nothing needs any more is taken off the list."""
    all_modules = modules()
    for name, top in PROTOCOL_EXCEPTIONS:
        assert any(i.module.split(".")[0] == top for i in all_modules[name].imports), (name, top)


# ------------------------------------------------------------------------------------------------- rooms within rooms

FILES_MAX = 20

PARTS_OF_ONE = {"cutwater.process_networks"}
"""A room without folders: its files are its parts, and `Network.start` leads to the host that runs the network."""


def place(name: str) -> str:
    """The folder, or the file of a room that lies in none: "cutwater.state.index", "cutwater.operators.base"."""
    parts = name.split(".")
    room = ".".join(parts[:2])
    return room if room in PARTS_OF_ONE else ".".join(parts[:3])


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Places that reach each other, as lists."""
    reached = {start: _reached(start, arrows) for start in arrows}
    found = {tuple(sorted(b for b in reached[a] if a in reached.get(b, ()))) for a in arrows if a in reached[a]}
    return [list(circle) for circle in sorted(found)]


def _reached(start: str, arrows: dict[str, set[str]]) -> set[str]:
    seen, todo = set[str](), [start]
    while todo:
        for target in arrows.get(todo.pop(), set()) - seen:
            seen.add(target)
            todo.append(target)
    return seen


def arrows_of(all_modules: dict[str, Module]) -> dict[str, set[str]]:
    """Which place imports which, when it is loaded or when a function of it is called."""
    arrows: dict[str, set[str]] = {}
    for module in all_modules.values():
        if module.room == "":
            continue
        for i in internal(module):
            target = i.module if i.module in all_modules else i.module.rpartition(".")[0]
            if not i.checking and target in all_modules and place(target) != place(module.name):
                arrows.setdefault(place(module.name), set()).add(place(target))
    return arrows


def test_no_folders_import_each_other_in_a_circle():
    assert circles(arrows_of(modules())) == []


def test_a_circle_is_seen_also_through_imports_in_functions():
    one = module_of("from cutwater.state.disk import rocks", "cutwater.state.index.x")
    other = module_of("def f():\n    import cutwater.state.index.x", "cutwater.state.disk.rocks")
    assert circles(arrows_of({m.name: m for m in (one, other)})) == [["cutwater.state.disk", "cutwater.state.index"]]


def large_folders(all_modules: dict[str, Module]) -> dict[str, int]:
    """Folders with too many files, and how many those are; what a package says of itself does not count."""
    sizes: dict[str, int] = {}
    for module in all_modules.values():
        folder = str(module.path.parent)
        sizes[folder] = sizes.get(folder, 0) + (module.path.name != "__init__.py")
    return {folder: n for folder, n in sizes.items() if n > FILES_MAX}


def test_no_folder_has_more_files_than_one_looks_through():
    assert large_folders(modules()) == {}


def test_a_large_folder_is_seen():
    many = {f"cutwater.state.x{n}": module_of("", f"cutwater.state.x{n}") for n in range(FILES_MAX + 1)}
    assert list(large_folders(many).values()) == [FILES_MAX + 1]


FACES = {
    "cutwater",
    "cutwater.process_networks",
    "cutwater.spark",
    "cutwater.testing",
    "cutwater.errors",
    "cutwater.api.aggregates",
}
"""Modules whose names are a promise to users; in all others a name without an underscore is for the house."""


def test_only_public_faces_list_their_names():
    assigned = [(m.name, node) for m in modules().values() for node in m.tree.body if isinstance(node, ast.Assign)]
    listing = {name for name, node in assigned if "__all__" in map(ast.unparse, node.targets)}
    assert listing == FACES


# ------------------------------------------------------------------------------------------------------------- tests

WITHOUT_A_ROOM = {
    "contract": "suites that several implementations pass",
    "fuzz": "bytes and folders from somebody hostile",
    "docs": "the documentation",
    "benchmarks": "the programs of the benchmarks",
}
PROCESSES = "processes"
"""Below a room: its tests that start real workers."""


def misplaced(folder: str) -> bool:
    """A folder of tests, "runtime/driver", is misplaced if it has no room of its name, with a folder of that name."""
    room, _, rest = folder.partition("/")
    if room in WITHOUT_A_ROOM:
        return bool(rest)
    here = SOURCE / PACKAGE / room
    return not here.is_dir() or not (rest in ("", PROCESSES) or (here / rest).is_dir())


def test_tests_lie_in_folders_named_as_the_rooms():
    tests = ROOT / "tests"
    folders = {path.parent.relative_to(tests).as_posix() for path in tests.rglob("test_*.py")} - {"."}
    assert [folder for folder in sorted(folders) if misplaced(folder)] == []


@pytest.mark.parametrize("folder", ["unit/state", "state/joins", "runtime/driver/processes", "fuzz/x", "network"])
def test_a_misplaced_folder_of_tests_is_seen(folder):
    assert misplaced(folder)
