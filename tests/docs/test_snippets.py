"""What the README and the guide tell a reader to run does run."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import generated
import pages

from cutwater.ui.cli import cli

COMMANDS = re.compile(r"^(make|cutwater|\.venv/bin/python|\.) .*$")


LIGHT = {"docs/guide/forks.md": 2}
"""Of pages with many jobs: so many of their blocks run every time, all of them in the full tests."""


def with_blocks(language: str) -> list[Path]:
    return [p for p in pages.PAGES if pages.blocks(p, language)]


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    from cutwater.spark.session import session

    found = session(2)
    yield found
    found.stop()


def pages_to_run() -> Iterator[Any]:
    """Pages with Python, and how many of their blocks."""
    for page in with_blocks("python"):
        name = pages.name(page)
        if name in LIGHT:
            yield pytest.param(page, LIGHT[name], id=f"{name} up to block {LIGHT[name]}")
        yield pytest.param(page, None, id=name, marks=[pytest.mark.full] if name in LIGHT else [])


@pytest.mark.spark
@pytest.mark.parametrize(("page", "first"), pages_to_run())
def test_the_python_blocks_of_a_page_run_from_top_to_bottom(
    page: Path,
    first: int | None,
    spark: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """What comes after ``# ->`` in a block is a line that it prints, in this order."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__", "spark": spark}
    blocks = pages.blocks(page, "python")[:first]
    for block in blocks:
        code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
        exec(code, names)
    printed = iter(capsys.readouterr().out.splitlines())
    promised = [line for b in blocks for line in re.findall(r"# -> (.*)", b.text)]
    assert [line for line in promised if line not in printed] == []
    job = names.get("job")
    if job is not None:
        assert job.status.outcome == "finished"


@pytest.mark.spark
@pytest.mark.parametrize(
    ("example", "says"),
    [
        ("word_count", r"finished \{.*'row': 3\}"),
        ("traced_run", r"finished - [\d,]+ events, \d+ complete snapshots: no violation"),
        ("late_rows", r"[\d,]+ on time \+ [1-9][\d,]* late = 20,000 of 20,000"),
        ("nexmark", r"q7, highest bid: 300,000 events, \d rows, finished"),
        ("spark_stream", r"\| +4\| +600\| +900900\||\| +4\| +900900\| +600\|"),
    ],
)
def test_an_example_runs_and_its_result_is_right(
    example: str,
    says: str,
    spark: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [example])
    monkeypatch.syspath_prepend(pages.ROOT / "examples")
    runpy.run_path(str(pages.ROOT / "examples" / f"{example}.py"), run_name="__main__")
    assert re.search(says, capsys.readouterr().out)


@pytest.mark.spark
def test_what_make_run_runs_heals_and_agrees_with_spark_sql():
    """The README's first command, replayed faster: it fails unless a kill healed and every table is exact."""
    command = [sys.executable, str(pages.ROOT / "examples" / "flights.py"), "--rate", "50000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "xactly-once" in done.stdout


@pytest.mark.full
@pytest.mark.spark
def test_the_example_with_loops_heals_and_agrees_with_networkx(tmp_path: Path):
    """In a process of its own: it makes its own session and kills a worker in it."""
    example = str(pages.ROOT / "examples" / "airports.py")
    done = subprocess.run(
        [sys.executable, example], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    says = r"killed a worker(?s:.*) 0 without .*: True\nflights .* 8 without .*: True\nmiles .*: True"
    assert re.search(says, done.stdout)


@pytest.mark.full
@pytest.mark.spark
def test_what_make_run_kafka_runs_heals_and_agrees_with_polars():
    """Processes of its own: a broker, a store, a job whose worker and driver die, and the servers die, too."""
    example = str(pages.ROOT / "examples" / "kafka_clicks.py")
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("exactly these, each once") == 2


def commands() -> list[tuple[str, str]]:
    found = [(pages.name(p), line) for p in pages.PAGES for b in pages.blocks(p, "sh") for line in b.text.splitlines()]
    return [(page, line.partition("#")[0].strip()) for page, line in found if line.strip()]


def problem(command: str) -> str | None:
    """What is wrong with a command of the documentation; None if nothing is."""
    words = shlex.split(command)
    if words[0] == "make":
        makefile = (pages.ROOT / "Makefile").read_text()
        unknown = [t for t in words[1:] if not re.search(rf"^{re.escape(t)}:", makefile, re.MULTILINE)]
        return f"no target {unknown}" if unknown else None
    if words[0] == "cutwater":
        known = cli.commands.get(words[1]) if len(words) > 1 else cli
        if known is None:
            return f"no command {words[1]!r}"
        try:
            known.make_context(words[1], words[2:])
        except click.ClickException as e:
            return e.format_message()
        return None
    if words[0] in (".venv/bin/python", "python"):
        return None if (pages.ROOT / words[1]).exists() or words[1] == "-m" else f"no file {words[1]}"
    plain = ([".", ".venv/bin/activate"], ["git", "commit"], ["pip", "install", "."])
    return None if words in plain else "not a command that can be checked"


@pytest.mark.parametrize(("page", "command"), commands())
def test_the_commands_of_a_page_exist_with_their_options(page: str, command: str):
    assert problem(command) is None


@pytest.mark.parametrize(
    "command", ["make nosuch", "cutwater nosuch", "cutwater run a.py --nosuch", "cutwater list", "rm -rf x"]
)
def test_a_wrong_command_is_seen(command: str):
    assert problem(command) is not None


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_links_lead_somewhere(page: Path):
    assert [target for target in pages.links(page) if not (page.parent / target).exists()] == []


def test_every_page_of_the_guide_is_in_its_index():
    index = pages.ROOT / "docs" / "index.md"
    guide = {p.relative_to(index.parent).as_posix() for p in (index.parent / "guide").glob("*.md")}
    assert guide - set(pages.links(index)) == set()


@pytest.mark.parametrize("name", generated.PAGES)
def test_generated_tables_are_current(name: str):
    """Otherwise run ``python tests/docs/generated.py``."""
    assert generated.PAGES[name].read_text() == generated.filled(name)


@pytest.mark.parametrize("name", generated.TABLES)
def test_every_row_of_a_generated_table_explains_itself(name: str):
    assert [line for line in generated.TABLES[name]().splitlines() if line.endswith("|  |")] == []


@pytest.mark.parametrize("page", ["architecture", "what-is-tested", "guide/security"])
def test_names_of_tests_in_a_page_exist(page: str):
    text = (pages.ROOT / "docs" / f"{page}.md").read_text()
    named = set(re.findall(r"`(tests/[\w/.]+\.py)`", text)) | set(re.findall(r"`(test_\w+)`", text))
    places = (pages.ROOT / "tests", pages.ROOT / "src" / "cutwater" / "testing")
    files = {p.relative_to(pages.ROOT).as_posix(): p.read_text() for place in places for p in place.rglob("*.py")}
    missing = [n for n in named if n not in files and not any(f"def {n}(" in t for t in files.values())]
    assert len(named) > 10
    assert missing == []


def test_the_flights_program_in_the_demo_builds(tmp_path: Path) -> None:
    """The part at the top of the demo, without Spark: its tables and what it promises."""
    import pyarrow as pa
    import pyarrow.parquet

    from cutwater.data.schema_text import as_schema

    sys.path.insert(0, str(pages.ROOT / "examples"))
    import flights

    tables = {
        "flights": "scheduled timestamp, carrier string, flight long, origin string, delay long, distance long",
        "weather": "observed timestamp, origin string, wind double, visibility double",
    }
    for name, columns in tables.items():
        (tmp_path / name).mkdir()
        pyarrow.parquet.write_table(as_schema(columns).empty_table(), tmp_path / name / "1.parquet")
    flow = flights.build(tmp_path, pa.table({"carrier": ["UA"], "name": ["United"]}), Path("/out"), rate=1000)
    flow.validate()
    sinks = [s.id for s in flow.graph.steps.values() if s.role == "sink"]
    assert sinks == ["airports", "airlines", "weather_at_departure", "cancellations"]
    assert all(f"{sink}: exactly-once" in flow.explain() for sink in sinks)
