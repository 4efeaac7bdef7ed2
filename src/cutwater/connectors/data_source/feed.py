"""Whatever a user's iterator gives, read in a thread of its own: nobody waits for it who has other things to do."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from cutwater.connectors.data_source import spark_api
from cutwater.connectors.data_source.hosted import Hosted
from cutwater.errors import CutwaterError, UserCodeError

_BATCHES = 2
"""Read ahead."""
_ROWS, _LONG_S = 8192, 0.02
"""Of a batch, and how long a slow reader's rows are gathered for one."""
_LOOK_S = 0.1


class Feed:
    """Batches of a partition.

    Args:
        hosted: whose.
        begin: gives the iterator; called in the thread.
        struct: the schema, as Spark has it.
        what: names the partition, for errors.
    """

    def __init__(self, hosted: Hosted, begin: Callable[[], Any], struct: Any, what: str) -> None:
        self._hosted, self._begin, self._struct, self._what = hosted, begin, struct, what
        self._queue: queue.Queue[pa.RecordBatch | CutwaterError | None] = queue.Queue(_BATCHES)
        self._stopped = threading.Event()
        self.ended = False
        """All batches were taken."""
        self._thread = threading.Thread(target=self._run, name="cutwater-data-source", daemon=True)
        self._thread.start()

    def take(self) -> pa.RecordBatch | None:
        """The next batch; ``None``: there is none now, or at the end none any more.

        Raises:
            UserCodeError: the user's code failed.
        """
        if self.ended:
            return None
        try:
            found = self._queue.get_nowait()
        except queue.Empty:
            return None
        if isinstance(found, CutwaterError):
            raise found
        self.ended = found is None
        return found

    def close(self) -> None:
        """Take no more.  The thread ends when the user's code gives the next row."""
        self._stopped.set()

    def _run(self) -> None:
        try:
            for batch in batches_of(self._hosted, self._begin, self._struct, self._what):
                if not self._put(batch):
                    return
            self._put(None)
        except CutwaterError as error:
            self._put(error)
        except BaseException as error:  # a thread that ends without a word is waited for without end
            self._put(UserCodeError(f"{self._hosted.name}: {self._what} cannot be read: {error!r}"))

    def _put(self, item: pa.RecordBatch | CutwaterError | None) -> bool:
        while not self._stopped.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put(item, timeout=_LOOK_S)
                return True
        return False


def batches_of(hosted: Hosted, begin: Callable[[], Any], struct: Any, what: str) -> Iterator[pa.RecordBatch]:
    """Batches of whatever an iterator of the user's gives.

    Args:
        begin: gives it.
        what: is read, for errors.

    Raises:
        UserCodeError: the user's code failed; says behind which row.
    """
    to_columns = spark_api.RowsToColumns(struct)
    read = 0
    with hosted.calling(f"{what} cannot be read"):
        rows = iter(begin())
    made = spark_api.batches(rows, to_columns, most=_ROWS, long_s=_LONG_S, clock=time.monotonic)
    while True:
        with hosted.calling(f"{what} cannot be read, behind row {read}"):
            batch = next(made, None)
        if batch is None:
            return
        read += batch.num_rows
        yield batch
