"""The page about connectors: its package runs in a job, and workers without it are told which one they lack."""

from __future__ import annotations

import json
import runpy
import shutil
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import connector_page
from cutwater.errors import CutwaterError

CLICKS = [(n, json.dumps({"user": f"u{n % 7}", "n": n})) for n in range(1, 500)]


def totals() -> dict[str, int]:
    """The newest sum of each user, as anybody reads the table."""
    with sqlite3.connect("clicks.db") as db:
        rows = db.execute("SELECT user, n FROM totals").fetchall()
    db.close()
    assert len(rows) == len(CLICKS), "an aggregate gives a row for each row"
    return {user: max(n for of, n in rows if of == user) for user, _ in rows}


@pytest.mark.full
@pytest.mark.spark
def test_the_package_runs_once_the_workers_have_it(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "site"
    place.mkdir()
    connector_page.write(place)
    connector_page.install(place)
    monkeypatch.chdir(tmp_path)
    with sqlite3.connect("clicks.db") as db:
        db.execute("CREATE TABLE clicks (id INTEGER PRIMARY KEY, body TEXT)")
        db.executemany("INSERT INTO clicks VALUES (?, ?)", CLICKS)
    db.close()
    program = (place / "program.py").read_text().replace('"clicks.db"', f'"{tmp_path / "clicks.db"}"')
    Path("program.py").write_text(program)
    with connector_page.importable(place):
        flow = runpy.run_path("program.py")["flow"]
        with pytest.raises(
            CutwaterError, match=r"'cutwater_queue'.* of the package cutwater-queue, .*pip install cutwater-queue==1\.0"
        ):
            flow.run(spark, checkpoint=tmp_path / "chk")
        archive = shutil.make_archive("cutwater_queue", "zip", place, connector_page.PACKAGE)
        spark.sparkContext.addPyFile(archive)
        job = flow.run(spark, checkpoint=tmp_path / "chk")
    assert job.status.outcome == "finished"
    expected: Counter[str] = Counter()
    for _, body in CLICKS:
        expected[json.loads(body)["user"]] += json.loads(body)["n"]
    assert totals() == expected
