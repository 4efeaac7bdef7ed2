"""A batch reader as a source: each of its partitions is a split."""

from __future__ import annotations

import uuid
from typing import Any

from cutwater.connectors.base import Json, SourceContext, Split
from cutwater.connectors.data_source import spark_api
from cutwater.connectors.data_source.hosted import pickled_by
from cutwater.connectors.data_source.partitions import DirectRows, Rows, RowsToCome, Staging
from cutwater.connectors.data_source.range_log import Plan, folder_of
from cutwater.connectors.data_source.staged_source import StagedSource


class BatchDataSource(StagedSource):
    """What ``DataSource.reader`` gives.

    Its partitions are asked for once in the life of a job, and written down with the reader, as pickled after it was
    asked, which is how Spark passes it on.
    """

    bounded = True

    def planned(self) -> Plan:
        """The reader and its partitions."""
        hosted = self.hosted
        with hosted.calling("reader() failed"):
            reader = hosted.made().reader(self.struct)
        with hosted.calling("partitions() failed"):
            partitions = spark_api.batch_partitions(reader)
        return Plan(
            uuid.uuid4().hex,
            reader=pickled_by(hosted, reader, f"the reader, a {type(reader).__name__},"),
            partitions=[pickled_by(hosted, each, f"partition {n}, {each!r},") for n, each in enumerate(partitions)],
        )

    def discover(self) -> list[Split]:
        """One split for each partition."""
        plan = self.plan
        return [Split(str(n), {"plan": plan.id, "partition": n}) for n in range(len(plan.partitions))]

    def earliest_time(self, split: Split, column: str, bound_us: int) -> None:
        """Unknown until a partition is read: a look would be a read more."""

    def open(self, split: Split, position: Json | None, ctx: SourceContext) -> BatchReader:
        """A reader of a partition.

        Raises:
            DataError: it is another plan's.
        """
        self.check_plan(split.data)
        number, plan, hosted = int(split.data["partition"]), self.plan, self.hosted
        with hosted.calling(f"partition {number} cannot be unpickled"):
            reader: Any = spark_api.unpickled(plan.reader)
            partition: Any = spark_api.unpickled(plan.partitions[number])
        what = f"partition {number}, {partition!r:.200},"
        begin = lambda: reader.read(partition)  # noqa: E731
        rows: Rows
        if self.repeats:
            rows = DirectRows(hosted, begin, self.struct, what, position, promised=False)
        else:
            store, folder = self.log.store, folder_of(0)
            begun = bool(position and position["rows"])
            with_end = lambda: (begin(), None)  # noqa: E731
            staging = Staging(store, folder, f"rows-{number:05}", hosted, with_end, self.struct, what, begun=begun)
            rows = RowsToCome(staging, store, folder, position)
        return BatchReader(rows, f"{hosted.name}, partition {number}")


class BatchReader:
    """Reads a partition.

    Args:
        rows: of it.
        origin: names it.
    """

    def __init__(self, rows: Rows, origin: str) -> None:
        self._rows, self.origin = rows, origin
        self.read, self.close = rows.read, rows.close

    @property
    def position(self) -> Json:
        """See ``SplitReader``."""
        return self._rows.position

    @property
    def exhausted(self) -> bool:
        """See ``SplitReader``."""
        return self._rows.ended
