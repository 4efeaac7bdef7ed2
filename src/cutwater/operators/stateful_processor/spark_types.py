"""All that hosting a ``StatefulProcessor`` needs of PySpark itself: its rows, schemas and time values.

PySpark is imported when it is first needed: a flow without such a processor runs without it.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import pyarrow as pa

from cutwater.data.schema_text import as_schema
from cutwater.errors import BuildError
from cutwater.state.objects.timers import EVENT, PROCESSING, TimerDomain

SparkSchema: TypeAlias = Any
"""A ``StructType``, a text such as ``"n long"``, or an Arrow schema."""


def arrow_schema(schema: SparkSchema) -> pa.Schema:
    """The Arrow schema of what Spark takes for one.

    Raises:
        BuildError: it is none, or holds a type that Arrow has no counterpart of.

    >>> arrow_schema("n long").field("n").type
    DataType(int64)
    """
    if isinstance(schema, str | pa.Schema):
        return as_schema(schema)
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    if not isinstance(schema, StructType):
        raise BuildError(
            f"a schema is needed, got {type(schema).__name__}", hint="Give a StructType, or a text such as 'n long'."
        )
    try:
        # Earlier versions of PySpark have no such parameter and always mean UTC.
        has_zone = "timezone" in inspect.signature(to_arrow_schema).parameters
        return to_arrow_schema(schema, timezone="UTC") if has_zone else to_arrow_schema(schema)
    except PySparkException as exc:
        raise BuildError(f"a type of {schema.simpleString()} has no place in Arrow: {exc}") from exc


def is_processor(value: object) -> bool:
    """Whether it is an object of a subclass of ``StatefulProcessor``."""
    try:
        from pyspark.sql.streaming.stateful_processor import StatefulProcessor
    except ImportError:
        return False
    return isinstance(value, StatefulProcessor)


def handles(processor: object, method: str) -> bool:
    """Whether the user's class overrides an optional method."""
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    return getattr(type(processor), method) is not getattr(StatefulProcessor, method)


@lru_cache(maxsize=1)
def _row_class() -> Any:
    from pyspark.sql import Row

    return Row


def row_maker(names: Sequence[str]) -> Callable[[Sequence[Any]], Any]:
    """Makes a ``Row`` with these names of its values.

    >>> row_maker(["a", "b"])((1, "x"))
    Row(a=1, b='x')
    """
    row, fields = _row_class(), list(names)
    new = tuple.__new__

    def make(values: Sequence[Any]) -> Any:
        made = new(row, values)
        made.__fields__ = fields
        return made

    return make


def timer_values(now_ms: int, watermark_ms: int) -> Any:
    """What a processor is told of the time; -1 for what its time mode has not."""
    from pyspark.sql.streaming.stateful_processor import TimerValues

    return TimerValues(now_ms, watermark_ms)


def expired_timer_info(expiry_ms: int) -> Any:
    """What a processor is told of the timer that is due."""
    from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo

    return ExpiredTimerInfo(expiry_ms)


def local_zone() -> str:
    """The time zone in which Spark shows timestamps to Python, as pandas takes it."""
    from pyspark.sql.pandas.types import _get_local_timezone  # pyright: ignore[reportPrivateUsage]

    return _get_local_timezone()


class TimeMode(enum.Enum):
    """What a processor's timers go by.

    >>> TimeMode.named("eventtime").unit
    1000
    """

    NONE = "None"
    PROCESSING = "ProcessingTime"
    EVENT = "EventTime"

    @property
    def domain(self) -> TimerDomain:
        """The clock of its timers."""
        return EVENT if self is TimeMode.EVENT else PROCESSING

    @property
    def unit(self) -> int:
        """How much one millisecond is on that clock."""
        return 1000 if self is TimeMode.EVENT else 1

    @classmethod
    def named(cls, name: object) -> TimeMode:
        """The mode of a name, whatever its case.

        Raises:
            BuildError: no such mode.
        """
        for mode in cls:
            if isinstance(name, str) and name.lower() == mode.value.lower():
                return mode
        raise BuildError(
            f"time_mode={name!r} is unknown", hint="Choose 'None', 'ProcessingTime' or 'EventTime' (as texts)."
        )


def check_output_mode(name: object) -> None:
    """Check an output mode.  A stream of rows is all there is here, so Append and Update come out the same.

    Raises:
        BuildError: no such mode, or one that only a table has.
    """
    if isinstance(name, str) and name.lower() in ("append", "update"):
        return
    if isinstance(name, str) and name.lower() == "complete":
        raise BuildError(
            "output_mode='Complete' would give out the whole result again and again, and a processor makes rows",
            hint="Write output_mode='Update'.",
        )
    raise BuildError(f"output_mode={name!r} is unknown", hint="Choose 'Append' or 'Update'.")
