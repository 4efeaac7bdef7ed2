"""What a table asks of whoever reads or writes it, and that we refuse by name what we do not do.

The library does not: it appends to a table with column mapping as if that had none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cutwater.errors import BuildError

_WRITABLE = frozenset(
    {
        "appendOnly",
        "changeDataFeed",
        "checkConstraints",
        "columnMapping",
        "domainMetadata",
        "generatedColumns",
        "identityColumns",
        "invariants",
        "timestampNtz",
        "vacuumProtocolCheck",
        "v2Checkpoint",
    }
)
"""Features whose use in the table is looked at, or that ask nothing of an append."""
_READABLE = frozenset({"columnMapping", "deletionVectors", "timestampNtz", "vacuumProtocolCheck", "v2Checkpoint"})
_NAMES = {
    "deletionVectors": "deletion vectors",
    "rowTracking": "row tracking",
    "icebergCompatV1": "Iceberg compatibility",
    "icebergCompatV2": "Iceberg compatibility",
}


class Asked(NamedTuple):
    """What a table asks for."""

    reader_version: int
    writer_version: int
    reader_features: frozenset[str]
    writer_features: frozenset[str]
    properties: Mapping[str, str | None]
    fields: tuple[Mapping[str, Any], ...]
    """Columns, as the log has them."""

    @property
    def append_only(self) -> bool:
        """Nothing may be removed."""
        return self._is_on("delta.appendOnly")

    @property
    def required(self) -> list[str]:
        """Columns that must not be null."""
        return [field["name"] for field in self.fields if not field["nullable"]]

    def _is_on(self, name: str) -> bool:
        return (self.properties.get(name) or "").lower() == "true"

    def refuse_to_write(self, path: str, *, upsert: bool) -> None:
        """Refuse a table that we would write wrongly.

        Raises:
            BuildError: with the feature.
        """
        for what, fix in self._not_written(upsert):
            raise BuildError(f"the Delta table {path!r} has {what}, which this sink does not write", hint=fix)

    def refuse_to_read(self, path: str) -> None:
        """Refuse a table that we would read wrongly.

        Raises:
            BuildError: with the feature.
        """
        hint = "Read it with Spark and pass the DataFrame to flow.read."
        if self._maps_columns or self.reader_version > 3:
            what = "column mapping" if self._maps_columns else f"reader version {self.reader_version}"
            raise BuildError(f"the Delta table {path!r} has {what}, which this source does not read", hint=hint)
        for feature in sorted(self.reader_features - _READABLE):
            name = _NAMES.get(feature, feature)
            raise BuildError(f"the Delta table {path!r} has {name}, which this source does not read", hint=hint)

    @property
    def _maps_columns(self) -> bool:
        return (self.properties.get("delta.columnMapping.mode") or "none").lower() != "none"

    def _not_written(self, upsert: bool) -> Iterator[tuple[str, str]]:
        other = "Write to another table, or through foreach_batch with Spark."
        if self.writer_version > 7 or self.reader_version > 3:
            yield f"protocol versions {self.reader_version} and {self.writer_version}", other
        if "deletionVectors" in self.writer_features:
            without = "ALTER TABLE ... DROP FEATURE deletionVectors, or write to another table."
            yield "deletion vectors", without
        for feature in sorted(self.writer_features - _WRITABLE):
            yield _NAMES.get(feature, f"the feature {feature!r}"), other
        if self._maps_columns:
            yield "column mapping", other
        constraints = sorted(name for name in self.properties if name.startswith("delta.constraints."))
        for name in constraints:
            yield f"a CHECK constraint {name.removeprefix('delta.constraints.')!r}", other
        if self.append_only and upsert:
            yield "delta.appendOnly set", "Append to it, or upsert into another table."
        for field in self.fields:
            yield from _not_written_of(field, other)


def _not_written_of(field: Mapping[str, Any], other: str) -> Iterator[tuple[str, str]]:
    metadata: Mapping[str, Any] = field.get("metadata") or {}
    if "delta.generationExpression" in metadata:
        yield f"a generated column {field['name']!r}", other
    if any(name.startswith("delta.identity.") for name in metadata):
        yield f"an identity column {field['name']!r}", other
    if "delta.invariants" in metadata:
        yield f"an invariant on column {field['name']!r}", other
