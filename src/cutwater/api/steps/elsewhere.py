"""Hints for a method that a stream does not have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from cutwater.config import format_us
from cutwater.errors import BuildError, did_you_mean

if TYPE_CHECKING:
    from cutwater.plan.graph import StreamType

_HERE = {
    "where": "filter('id', expression)",
    **dict.fromkeys(("groupBy", "group_by", "groupby", "keyBy"), "key_by('column')"),
    **dict.fromkeys(("withColumn", "withColumns"), "with_columns('id', name=expression)"),
    "withColumnRenamed": "rename('id', old='new')",
    **dict.fromkeys(("dropDuplicates", "drop_duplicates", "distinct"), "key_by('column').deduplicate('id')"),
    **dict.fromkeys(
        ("withWatermark", "assign_timestamps_and_watermarks"), "read(..., event_time='at', out_of_order='10s')"
    ),
    **dict.fromkeys(("agg", "reduce", "sum", "count"), "key_by('column').aggregate('id', n=cw.count())"),
    **dict.fromkeys(("mapInArrow", "map_partitions", "mapPartitions"), "map_batches('id', function, schema)"),
    "flatMap": "flat_map('id', function, schema)",
    "unionByName": "union('id', other)",
    "foreachBatch": "foreach_batch('id', function)",
    **dict.fromkeys(("show", "print"), "write('id', cw.console())"),
    **dict.fromkeys(("writeStream", "sink", "sink_to", "add_sink", "sinkTo"), "write('id', sink)"),
}
"""Names of other libraries for methods that are here."""
_OVER_ALL = ("aggregate", "window", "top")


class MissingMethodError(BuildError, AttributeError):
    """A stream has no such method; an ``AttributeError`` as well, so that ``hasattr`` tells the truth."""


def missing_method(
    name: str, there: Iterable[str], *, keyed: bool, step: str, type: StreamType | None = None
) -> MissingMethodError:
    """The error for a method that a stream does not have.

    Args:
        name: of the method.
        there: names of the methods that it has.
        keyed: whether a stream with a key has it.
        step: where the stream comes from.
        type: of the stream, if it is one.
    """
    if keyed:
        hint = f"Write .key_by('column').{name}(...)."
        if type is not None and type.span is not None and name in _OVER_ALL:
            size, offset = type.span
            same = f"cw.tumbling({format_us(size)!r}{f', offset={format_us(offset)!r}' if offset else ''})"
            rest = f".{name}" if name != "window" else ".aggregate"
            hint += f" Over the results of each window: .key_by({type.event_time!r}).window('id', {same}){rest}(...)."
        elif name in _OVER_ALL:
            hint += (
                " For one result over all rows give them one key: "
                f".with_columns('id', everything=pl.lit(0)).key_by('everything').{name}(...)."
            )
        return MissingMethodError(f"{name} needs a key, this stream has none", step=step, hint=hint)
    hint = f"Write {_HERE[name]}." if name in _HERE else did_you_mean(name, [n for n in there if n[0] != "_"])
    return MissingMethodError(f"a stream has no {name!r}", step=step, hint=hint)
