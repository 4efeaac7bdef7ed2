"""The additions that CONTRIBUTING.md walks a newcomer through: applied to a copy of the tree, they work."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from numba.core.caching import UserProvidedCacheLocator

from cutwater.state.kernels import cache_directory

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "CONTRIBUTING.md"
BLOCK = r"\n\n```py\n(?P<{}>.*?)^```$"
STEPS = re.compile(
    "|".join(
        [
            r"^New file `(?P<new>[^`]+)`:" + BLOCK.format("whole"),
            r"^In `(?P<below>[^`]+)`, below `(?P<over>[^`\n]+)`:" + BLOCK.format("behind"),
            r"^In `(?P<above>[^`]+)`, above `(?P<under>[^`\n]+)`:" + BLOCK.format("before"),
            r"^In `(?P<file>[^`]+)`, [^`\n]+:" + BLOCK.format("was") + r"\n\nbecome" + BLOCK.format("now"),
            r"^Run `(?P<run>[^`]+)`",
        ]
    ),
    re.MULTILINE | re.DOTALL,
)


BLOCKS = {"whole", "behind", "before", "was", "now"}


@dataclass(frozen=True)
class Walk:
    """One addition: its title, its steps, and the arguments of pytest that try it."""

    title: str
    steps: list[dict[str, str]]

    @property
    def files(self) -> list[str]:
        return [step[name] for step in self.steps for name in ("new", "below", "above", "file") if name in step]

    @property
    def run(self) -> list[str]:
        """Files of its suite, and the tests in them that are about it."""
        (found,) = [step["run"] for step in self.steps if "run" in step]
        return [part.strip('"') for part in found.split(" -k ")]


def walks() -> Iterator[Walk]:
    _, _, text = PAGE.read_text().partition("## Your first addition\n")
    for part in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        found = [{k: v for k, v in m.groupdict().items() if v is not None} for m in STEPS.finditer(part)]
        assert part.count("```py\n") == sum(len(BLOCKS & s.keys()) for s in found), "every block belongs to a step"
        yield Walk(part.partition("\n")[0], found)


def replaced(text: str, old: str, new: str) -> str:
    assert text.count(f"\n{old}") == 1, f"{old!r} stands there {text.count(chr(10) + old)} times"
    return text.replace(f"\n{old}", f"\n{new}")


def apply(step: dict[str, str], tree: Path) -> None:
    match step:
        case {"new": name, "whole": text}:
            assert not (tree / name).exists()
            (tree / name).write_text(text)
        case {"below": name, "over": line, "behind": text}:
            (tree / name).write_text(replaced((tree / name).read_text(), f"{line}\n", f"{line}\n{text}"))
        case {"above": name, "under": line, "before": text}:
            (tree / name).write_text(replaced((tree / name).read_text(), f"{line}\n", f"{text}{line}\n"))
        case {"file": name, "was": old, "now": new}:
            (tree / name).write_text(replaced((tree / name).read_text(), old, new))
        case _:
            assert "run" in step


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with all additions.  It finds the kernels that are compiled already."""
    copy = tmp_path_factory.mktemp("walks")
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copy2(ROOT / "pyproject.toml", copy)
    place = cache_directory()
    for source in {path.parent for path in (ROOT / "src").rglob("*kernels.py")} if place else ():
        now, then = (
            UserProvidedCacheLocator.get_suitable_cache_subpath(str(of / "kernels.py"))
            for of in (copy / source.relative_to(ROOT), source)
        )
        if Path(place or "", then).is_dir():
            shutil.copytree(Path(place or "", then), copy / "kernels" / f"cutwater-{(place or '')[-12:]}" / now)
    for walk in walks():
        for step in walk.steps:
            apply(step, copy)
    return copy


def in_tree(tree: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "NUMBA_CACHE_DIR": str(tree / "kernels")}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, check=False, cwd=tree, env=environment, capture_output=True, text=True)
    failed = "\n".join(line for line in done.stdout.splitlines() if not line.startswith("PASSED"))
    assert done.returncode == 0, failed[-4000:] + done.stderr[-2000:]
    return done.stdout


def test_there_is_a_walk_for_each_kind_of_addition() -> None:
    assert [walk.title for walk in walks()] == ["An aggregate", "A kind of windows", "A step", "A sink", "A store"]


@pytest.mark.parametrize("walk", walks(), ids=lambda walk: walk.title)
def test_an_addition_touches_one_room_the_users_face_and_its_suite(walk: Walk) -> None:
    source = [Path(name).parts[2:] for name in walk.files if name.startswith("src/")]
    rooms = {parts[0] for parts in source if parts[0] not in ("__init__.py", "api")}
    folders = {parts[:-1] for parts in source if parts[0] in rooms}
    assert len(folders) == 1, folders
    assert len(walk.run) == 2, "files of its suite, and which tests are about it"


@pytest.mark.timeout(600)
def test_what_the_additions_add_passes_its_suites_and_the_rules_of_the_house(tree: Path) -> None:
    """In one process: the start of each takes longer than its tests."""
    suites = [file for walk in walks() for file in walk.run[0].split()]
    about = [f"({walk.run[1]})" for walk in walks()]
    rules = ["test_tidy", "test_layers", "test_public_api"]
    suites += [f"tests/{rule}.py" for rule in rules]
    said = in_tree(tree, "-m", "pytest", "-p", "no:xdist", "-rp", "-k", " or ".join([*about, *rules]), *suites)
    passed = [line for line in said.splitlines() if line.startswith("PASSED")]
    for walk in walks():
        name = re.findall(r"\w+", walk.run[1])[-1]
        assert any(file in line and name in line for line in passed for file in walk.run[0].split()), walk.title


def test_with_the_additions_a_dataflow_is_built_and_still_loads_no_kernels(tree: Path) -> None:
    script = """
import sys
import cutwater as cw
stream = cw.Dataflow('walk').read('r', cw.rate(None, rows=5), event_time='timestamp').drop_nulls('whole', 'value')
keyed = stream.key_by('value').window('w', cw.weekly(first_day=6))
keyed.aggregate('range', range=cw.value_range('value')).write('log', cw.tally())
assert 'numba' not in sys.modules
"""
    in_tree(tree, "-c", script)
