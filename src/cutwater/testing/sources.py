"""What every source promises: any recorded position gives exactly the rest, whatever the batches' sizes."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import pyarrow as pa
import pytest

from cutwater.connectors.base import Json, Source, SourceHooks, Split, SplitReader
from cutwater.errors import DataError
from cutwater.testing.shipping import shipped

_ALL = 1_000_000
"""Rows asked for at once: more than a test has."""
_POSITIONS = 15
"""How many positions of one reading are gone back to."""
_LOOKS, _PAUSE_S = 1000, 0.001
"""How often a reader may have nothing although it is not exhausted, and what is waited for between."""


class DeadLetters:
    """A reader's context, which keeps its bad rows."""

    job_uid, step, subtask, incarnation = "c0ffee", "read", 0, 1

    def __init__(self) -> None:
        self.letters: list[tuple[str, int, str, str]] = []

    def dead_letter(self, origin: str, position: int, reason: str, raw: str) -> None:
        told = (origin, position, reason, raw)
        kinds = [type(part) for part in told]
        assert kinds == [str, int, str, str], f"a dead letter is origin, position, reason and raw, not {told}"
        assert origin, "a dead letter names the file, table or split that it comes from"
        assert reason, "a dead letter says what is wrong with the row"
        self.letters.append(told)


class Mark(NamedTuple):
    """A position, and what had been read when the reader had it."""

    position: Json
    rows: int
    letters: int


class Reading(NamedTuple):
    """What came out of a split."""

    rows: pa.Table
    marks: list[Mark]
    letters: list[tuple[str, int, str, str]]


class SourceContract:
    """The tests of a source.  A subclass has the fixtures ``source`` and ``rows``, and perhaps ``bad_rows``.

    The source must be over few rows (some hundred), of several splits and batches, and nothing may change it while a
    test runs.  With ``bad_rows`` it must be one that puts them into the dead letters.
    """

    sizes: Sequence[int] = (1, 2, 7, 1000)
    """Numbers of rows that are asked for at a time."""
    quiet_reads = 5
    """An unbounded source's split counts as read after so many reads without a row (0.1 s between them)."""

    @pytest.fixture
    def source(self) -> Source:
        """The source."""
        pytest.fail(f"{type(self).__name__} has no fixture 'source'")

    @pytest.fixture
    def rows(self) -> Sequence[Mapping[str, object]] | Sequence[int] | int:
        """The rows that it has, in any order, or how many: of each split, or of all together."""
        pytest.fail(f"{type(self).__name__} has no fixture 'rows'")

    @pytest.fixture
    def bad_rows(self) -> int:
        """How many rows cannot be read."""
        return 0

    def drain(self, source: Source, split: Split, position: Json | None, size: int, limit: int = 100_000) -> Reading:
        """Read a split to its end (of an unbounded source: until nothing comes) from a position.

        Args:
            limit: it has no more rows than these.
        """
        ctx, schema = DeadLetters(), source.schema  # asked for once: it may mean a look at the data
        reader = source.open(split, position, ctx)
        batches: list[pa.RecordBatch] = []
        marks = [Mark(_recorded(reader), 0, 0)]
        seen = 0
        try:
            for batch in self._reads(source, reader, size):
                if batch is not None:
                    self._check_batch(schema, reader, batch, size)
                    batches.append(batch)
                    seen += batch.num_rows
                    assert seen <= limit, f"{split.id} has {limit} rows, but more come in batches of {size}"
                marks.append(Mark(_recorded(reader), seen, len(ctx.letters)))
            assert reader.read(size) is None, "a reader that has come to the end gives no more rows"
        finally:
            reader.close()
        return Reading(pa.Table.from_batches(batches, schema), marks, ctx.letters)

    def _reads(self, source: Source, reader: SplitReader, size: int) -> Iterator[pa.RecordBatch | None]:
        idle = 0
        while not reader.exhausted:
            batch = reader.read(size)
            idle = idle + 1 if batch is None else 0
            if batch is None and not source.bounded:
                if idle >= self.quiet_reads:
                    return
                time.sleep(0.1)
            elif batch is None:
                assert idle < _LOOKS, "a bounded source has nothing to read for long, yet is not exhausted"
                time.sleep(_PAUSE_S)
            yield batch

    def _check_batch(self, schema: pa.Schema, reader: SplitReader, batch: pa.RecordBatch, size: int) -> None:
        assert 1 <= batch.num_rows <= size, f"{batch.num_rows} rows in a batch, where 1 to {size} were asked for"
        told = f"rows have the schema\n{batch.schema}\nthe source promised\n{schema}"
        assert batch.schema.equals(schema, check_metadata=True), told
        batch.validate(full=True)
        assert reader.origin, "a reader names what its last batch was (origin)"

    # ------------------------------------------------------------------------------------------------------- tests

    def test_any_recorded_position_gives_exactly_the_rest(self, source: Source) -> None:
        """In batches of any size; so do bad rows, each once."""
        for split in source.discover():
            whole = self.drain(source, split, None, _ALL)
            for size in self.sizes:
                found = self.drain(source, split, None, size, len(whole.rows))
                assert found.rows.equals(whole.rows), f"other rows of {split.id} in batches of {size} than in one"
                assert found.letters == whole.letters, f"other bad rows of {split.id} in batches of {size} than in one"
                step = max(1, len(found.marks) // _POSITIONS)
                for mark in found.marks[::step] + found.marks[-1:]:
                    rest = self.drain(source, split, mark.position, 1000)
                    where = f"from {mark.position} of {split.id}, behind {mark.rows} rows read by {size}"
                    assert rest.rows.equals(whole.rows.slice(mark.rows)), f"{where} come other rows than the rest"
                    assert rest.letters == whole.letters[mark.letters :], f"{where} come other bad rows than the rest"

    def test_splits_together_hold_every_row_once(
        self, source: Source, rows: Sequence[Mapping[str, object]] | Sequence[int] | int, bad_rows: int
    ) -> None:
        readings = [self.drain(source, split, None, 1000) for split in source.discover()]
        assert sum(len(reading.letters) for reading in readings) == bad_rows, "the bad rows are not those there are"
        counts = [len(reading.rows) for reading in readings]
        if isinstance(rows, int):
            assert sum(counts) == rows
        elif rows and isinstance(rows[0], int):
            assert counts == list(rows)
        else:
            found = Counter(_frozen(row) for reading in readings for row in reading.rows.to_pylist())
            expected = Counter(_frozen(cast("Mapping[str, object]", row)) for row in rows)
            assert found - expected == Counter(), "rows that are not there, or twice"
            assert expected - found == Counter(), "rows that were not read"

    def test_splits_are_found_again_with_the_same_ids_and_survive_json(self, source: Source) -> None:
        splits = source.discover()
        again = [[split.id, split.data] for split in source.discover()]
        assert _by_json(again) == [[split.id, split.data] for split in splits], "other splits at the second look"
        assert len({split.id for split in splits}) == len(splits), "two splits have one id"

    def test_a_shipped_copy_reads_the_same(self, source: Source) -> None:
        """As a worker does, which gets the source by Spark's pickler."""
        schema, splits = source.schema, source.discover()
        copy = shipped(source)
        assert copy.schema.equals(schema)
        assert copy.discover() == splits
        for split in splits:
            told = f"a copy of the source reads other rows of {split.id}"
            assert self.drain(copy, split, None, 100).rows.equals(self.drain(source, split, None, 100).rows), told

    def test_an_exhausted_position_stays_exhausted(self, source: Source) -> None:
        for split in source.discover():
            end = self.drain(source, split, None, 1000).marks[-1].position
            reader = source.open(split, end, DeadLetters())
            assert reader.read(10) is None, f"rows behind the end of {split.id}"
            assert reader.exhausted or not source.bounded, f"{split.id} has no end when it is opened there"
            reader.close()

    def test_readers_of_one_split_do_not_disturb_each_other(self, source: Source) -> None:
        """A worker that was given up for dead may go on while its successor reads, and a closed reader is gone."""
        for split in source.discover():
            whole = self.drain(source, split, None, _ALL).rows
            other = source.open(split, None, DeadLetters())
            reader = source.open(split, None, DeadLetters())
            batches: list[pa.RecordBatch] = []
            for number, batch in enumerate(self._reads(source, reader, 3)):
                batches += [] if batch is None else [batch]
                if number == 2:
                    other.close()
                elif number < 2:
                    other.read(2)
            reader.close()
            told = f"a second reader of {split.id} changed what the first one read"
            assert pa.Table.from_batches(batches, source.schema).equals(whole), told

    def test_columns_that_nobody_asks_for_may_be_left_out_and_no_others(self, source: Source, bad_rows: int) -> None:
        """Of a source that is told which columns are read (``SourceHooks.reading``)."""
        for name in source.schema.names if not bad_rows else ():
            narrow = SourceHooks(source).reading(frozenset({name}), dictionaries=False)
            for split in source.discover():
                whole = self.drain(source, split, None, 1000).rows
                assert self.drain(narrow, split, None, 7).rows[name].equals(whole[name]), f"other values of {name}"

    def test_bad_rows_fail_the_job_unless_asked_for(self, source: Source, bad_rows: int) -> None:
        """``bad_rows="fail"`` raises ``DataError``, which names the row; a source without has no bad rows."""
        if not bad_rows:
            return
        strict = SourceHooks(source).with_bad_rows("fail")
        assert SourceHooks(strict).bad_rows == "fail"
        with pytest.raises(DataError) as raised:
            for split in source.discover():
                self.drain(strict, split, None, 1000)
        assert str(raised.value), "the error says which row, and what is wrong with it"

    def test_it_says_what_it_is(self, source: Source) -> None:
        assert isinstance(source.bounded, bool)
        assert source.replayable, "a source that cannot go back is refused by exactly-once jobs"
        assert source.rate is None or source.rate > 0
        assert source.discover_interval_ms > 0
        assert source.schema.equals(source.schema, check_metadata=True)


def _recorded(reader: SplitReader) -> Json:
    """A reader's position as a checkpoint has it.

    It may change with the next read: what was recorded must not.
    """
    position = reader.position
    kept = _by_json(position)
    assert kept == position, f"the position {position!r} is {kept!r} in a checkpoint: use JSON values only"
    return kept


def _by_json(value: Json) -> Json:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"{value!r} cannot be written into a checkpoint: {error}") from error


def _frozen(row: Mapping[str, Any]) -> str:
    """A row as text, to be counted: values may be lists and dicts."""
    return repr(sorted(row.items()))
