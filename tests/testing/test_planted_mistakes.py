"""A mistake in a source or sink is found by the suite, each by the test that is about it.

The connector is that of ``docs/guide/connectors.md``; each case puts one text of it for another.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import connector_page

WITHOUT = ("cacheprovider", "terminal", "xdist", "timeout", "rerunfailures", "faulthandler", "unraisableexception")
SOURCE, SINK, TESTS = f"{connector_page.PACKAGE}/source.py", f"{connector_page.PACKAGE}/sink.py", "test_queue.py"

POSITIONS = "test_any_recorded_position_gives_exactly_the_rest"
ROWS = "test_splits_together_hold_every_row_once"
SPLITS = "test_splits_are_found_again_with_the_same_ids_and_survive_json"
COPY = "test_a_shipped_copy_reads_the_same"

SOURCES = {
    "the position is the row read last": (
        "found[-1][0] + 1 if",
        "found[-1][0] if",
        POSITIONS,
    ),
    "the position skips rows": ("found[-1][0] + 1 if", "found[-1][0] + 7 if", POSITIONS),
    "the position is not gone to": ("0 if position is None else position", "0", POSITIONS),
    "the position is no JSON value": ("        return self._next\n", "        return (self._next,)\n", POSITIONS),
    "the end is forgotten": (
        "        return self._next\n",
        "        return 0 if self.exhausted else self._next\n",
        POSITIONS,
    ),
    "rows are taken out": (
        "        rows = [row for",
        '        self._db.execute("DELETE FROM clicks WHERE id < ? AND id % 2 = ?", (self._next, self._rest))\n'
        "        self._db.commit()\n        rows = [row for",
        POSITIONS,
    ),
    "more rows than asked for": ("LIMIT ?", "LIMIT 2 * ?", POSITIONS),
    "a batch without rows": (" if rows else None", "", POSITIONS),
    "no end": ("return self._next > self._last", "return False", POSITIONS),
    "another schema": (
        "from_pylist(rows, self._source.schema)",
        'from_pylist(rows, self._source.schema).select(["n", "user", "id"])',
        POSITIONS,
    ),
    "bad rows of a batch that is read twice come twice": (
        "        rows = [row for id, body in found if (row := self._parsed(id, body)) is not None]\n",
        "        rows = [row for id, body in found if (row := self._parsed(id, body)) is not None]\n"
        "        ahead = self._db.execute('SELECT id, body FROM clicks WHERE id >= ? AND id % 2 = ? LIMIT 1',\n"
        "                                 (self._next, self._rest))\n"
        "        [self._parsed(*row) for row in ahead]\n",
        POSITIONS,
    ),
    "a bad row's place is a text": ("dead_letter(self.origin, id,", "dead_letter(self.origin, str(id),", POSITIONS),
    "the last row is lost": ("id <= ?", "id < ?", ROWS),
    "splits overlap": ("id % ? = ?", "id % ? >= ?", ROWS),
    "bad rows are lost": ("            self._ctx.dead_letter(self.origin, id, repr(error), body)\n", "", ROWS),
    "splits have one id": ('f"{self.table}/{rest}"', "self.table", SPLITS),
    "splits have new ids": ('f"{self.table}/{rest}"', 'str(__import__("uuid").uuid4())', SPLITS),
    "it holds a connection": (
        '    bad_rows: BadRows = "fail"\n\n',
        '    bad_rows: BadRows = "fail"\n\n'
        "    def __post_init__(self):\n"
        '        object.__setattr__(self, "db", sqlite3.connect(self.path))\n\n',
        COPY,
    ),
    "a reader locks others out": (
        "self._db = sqlite3.connect(source.path)",
        'self._db = sqlite3.connect(source.path, timeout=0.1)\n        self._db.execute("BEGIN EXCLUSIVE")',
        "test_readers_of_one_split_do_not_disturb_each_other",
    ),
    "a bad row is an error of another kind": (
        "raise DataError(f",
        "raise RuntimeError(f",
        "test_bad_rows_fail_the_job_unless_asked_for",
    ),
    "it cannot go back": (
        "replayable: ClassVar[bool] = True",
        "replayable: ClassVar[bool] = False",
        "test_it_says_what_it_is",
    ),
}

INVISIBLE = "test_rows_are_invisible_until_their_checkpoint_is_committed"
AGAIN = "test_a_commit_that_comes_again_counts_once"
RESTORE = "test_a_restore_commits_what_its_checkpoint_names_and_nothing_later"
OLD = "test_what_a_worker_or_driver_of_before_still_does_changes_nothing"
BACK = "test_going_back_to_an_older_checkpoint_takes_back_what_came_after"
FORK = "test_t3_a_fork_neither_commits_nor_aborts_nor_continues_what_another_uid_wrote"
JOBS = "test_rows_are_visible_exactly_once_and_not_before_their_checkpoint"
SAYS = "test_it_says_what_it_is"

SINKS = {
    "rows are visible at once": ("visible INTEGER DEFAULT 0", "visible INTEGER DEFAULT 1", INVISIBLE),
    "nothing is committed": ("SET visible = 1 WHERE", "SET visible = 0 WHERE", INVISIBLE),
    "the second commit undoes the first": ("SET visible = 1 WHERE", "SET visible = 1 - visible WHERE", AGAIN),
    "the cut is when rows are made durable": (
        "        batches, self._batches = self._batches, []\n        return lambda: PreCommit("
        "[self._stage(checkpoint_id, batches)] if batches else [])\n",
        "        def make():\n            batches, self._batches = self._batches, []\n            return PreCommit("
        "[self._stage(checkpoint_id, batches)] if batches else [])\n        return make\n",
        "test_the_cut_is_at_the_barrier",
    ),
    "rows come with every checkpoint again": (
        "batches, self._batches = self._batches, []",
        "batches = list(self._batches)",
        INVISIBLE,
    ),
    "handles are no JSON values": (
        'return {"piece": piece}',
        'return {"piece": piece, "of": {1}}',
        "test_handles_and_states_survive_json",
    ),
    "it holds a lock": (
        "    def check(self, schema",
        '    def __post_init__(self):\n        object.__setattr__(self, "lock", __import__("threading").Lock())\n\n'
        "    def check(self, schema",
        "test_a_shipped_copy_is_its_equal",
    ),
    "a guarantee that there is not": ('Guarantee] = "exactly-once"', 'Guarantee] = "exactly once"', SAYS),
    "what is staged lies in memory": (
        "        with transaction(self._sink.path) as db:\n            self._show(db, handles)\n",
        "        with transaction(self._sink.path) as db:\n"
        '            self._show(db, [handle for handle in handles if handle["piece"] in STAGED])\n',
        "test_another_process_commits",
    ),
    "a restore commits nothing": (
        "                self._show(db, restored.handles)\n",
        "                pass\n",
        RESTORE,
    ),
    "a restore begins with removing": (
        "            if restored is not None:\n                self._show(db, restored.handles)\n",
        '            self._remove(db, "incarnation < ? AND NOT visible", incarnation)\n'
        "            if restored is not None:\n                self._show(db, restored.handles)\n",
        RESTORE,
    ),
    "numbers of pieces come again": (" AUTOINCREMENT", "", OLD),
    "a driver of before removes what its successor's workers staged": (
        '"incarnation < ? AND (checkpoint_id',
        '"incarnation < 9 + ? AND (checkpoint_id',
        OLD,
    ),
    "pieces do not know their attempt": ("checkpoint_id, ctx.incarnation)", "checkpoint_id, 0)", OLD),
    "what came later stays": ("(checkpoint_id > ? OR NOT visible)", "checkpoint_id > ? AND NOT visible", BACK),
    "pieces do not know their checkpoint": (
        "ctx.step, checkpoint_id, ctx.incarnation",
        "ctx.step, 0, ctx.incarnation",
        BACK,
    ),
    "the restored checkpoint is taken back, too": ("(checkpoint_id > ?", "(checkpoint_id >= ?", AGAIN),
    "a fork commits what its origin wrote": (
        "WHERE job = ? AND step = ? AND piece = ?",
        "WHERE ? IS NOT NULL AND step = ? AND piece = ?",
        FORK,
    ),
    "a fork removes what its origin wrote": (
        "WHERE job = ? AND step = ? AND {which}",
        "WHERE ? IS NOT NULL AND step = ? AND {which}",
        FORK,
    ),
    "closing writes what is left": (
        '        """Nothing is open."""\n',
        "        if self._batches:\n            piece = self._stage(0, self._batches)['piece']\n"
        "            with transaction(self._sink.path) as db:\n"
        "                db.execute(f'UPDATE out_pieces SET visible = 1 WHERE piece = {piece}')\n",
        "test_a_writer_that_closes_commits_nothing",
    ),
    "only the first batch is written": ("for batch in batches:", "for batch in batches[:1]:", JOBS),
    "a retired checkpoint takes along what was not committed": (
        '        """What a checkpoint needs of this sink is visible before the next one is complete: '
        'nothing to remove."""',
        "        with transaction(self._sink.path) as db:\n"
        '            self._remove(db, "checkpoint_id <= ? AND NOT visible", retired.checkpoint_id)',
        "test_a_retired_checkpoint_takes_nothing_along_that_others_need",
    ),
    "something is left at the end": (
        '            self._remove(db, "incarnation <= ? AND NOT visible", incarnation)\n',
        "            pass\n",
        JOBS,
    ),
}
STAGED = [
    (SINK, 'return {"piece": piece}', 'STAGED.add(piece)\n        return {"piece": piece}'),
    (SINK, "TYPES = {", "STAGED = set()\nTYPES = {"),
]
GLOBAL = (
    "    parallelism: ClassVar[int | None] = None\n",
    "    parallelism: ClassVar[int | None] = None\n    commits_globally = True\n",
)


class Outcomes:
    """What tests came to in a run of pytest in this process."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.passed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2]
        if report.failed:
            self.failed.append(name)
        elif report.when == "call":
            self.passed.append(name)


def outcomes(folder: Path, tests: str, *mistakes: tuple[str, str, str]) -> Outcomes:
    """Run tests of the page's package."""
    connector_page.write(folder, *mistakes)
    found = Outcomes()
    without = [part for name in WITHOUT for part in ("-p", f"no:{name}")]
    with connector_page.importable(folder):
        arguments = [*without, "-c", os.devnull, "--rootdir", str(folder), f"{folder}/test_queue.py::{tests}"]
        pytest.main(arguments, plugins=[found])
    return found


@pytest.mark.parametrize("name", SOURCES)
def test_a_mistake_in_a_source_is_found(name: str, tmp_path: Path) -> None:
    right, wrong, test = SOURCES[name]
    assert outcomes(tmp_path, f"TestSource::{test}", (SOURCE, right, wrong)).failed == [test]


@pytest.mark.parametrize("name", SINKS)
def test_a_mistake_in_a_sink_is_found(name: str, tmp_path: Path) -> None:
    right, wrong, test = SINKS[name]
    more = STAGED if "STAGED" in wrong else []
    assert outcomes(tmp_path, f"TestSink::{test}", (SINK, right, wrong), *more).failed == [test]


def test_a_source_that_leaves_out_what_is_asked_for_is_found(tmp_path: Path) -> None:
    test = "test_columns_that_nobody_asks_for_may_be_left_out_and_no_others"
    reading = "    def reading(self, columns, *, dictionaries):\n        return replace(self, splits=1)\n\n"
    mistakes = [(SOURCE, "    def discover(self)", f"{reading}    def discover(self)")]
    mistakes += [(TESTS, """, (11, "{"), (44, '{"user": "u"}')""", ""), (TESTS, "return 2", "return 0")]
    assert outcomes(tmp_path, f"TestSource::{test}", *mistakes).failed == [test]


def test_a_global_commit_that_looks_at_its_own_checkpoint_only_is_found(tmp_path: Path) -> None:
    test = "test_rows_of_an_aborted_checkpoint_come_with_the_next"
    mistakes = [
        (SINK, *GLOBAL),
        (SINK, 'return {"piece": piece}', 'return {"piece": piece, "checkpoint_id": checkpoint_id}'),
        (
            SINK,
            "        with transaction(self._sink.path) as db:\n            self._show(db, handles)\n",
            "        with transaction(self._sink.path) as db:\n"
            '            self._show(db, [h for h in handles if h["checkpoint_id"] == checkpoint_id])\n',
        ),
    ]
    assert outcomes(tmp_path, f"TestSink::{test}", *mistakes).failed == [test]


@pytest.mark.parametrize(("tests", "mistakes"), [("TestSource", []), ("TestSink", []), ("TestSink", [(SINK, *GLOBAL)])])
def test_without_mistakes_all_of_them_pass(tests: str, mistakes: list[tuple[str, str, str]], tmp_path: Path) -> None:
    found = outcomes(tmp_path, tests, *mistakes)
    assert found.failed == []
    assert set(found.passed) >= {test for _, _, test in (SOURCES if tests == "TestSource" else SINKS).values()}
