"""Options of the data source ``cutwater`` that reading and writing share."""

from __future__ import annotations

from collections.abc import Mapping

from cutwater.errors import ConfigError


def state_name(options: Mapping[str, str]) -> str:
    """What names the table: option ``state``, ``step``, or both together.

    Raises:
        ConfigError: neither is given.

    >>> state_name({"step": "logic", "state": "seen"}), state_name({"state": "counts"})
    ('logic.seen', 'counts')
    """
    parts = [options[name] for name in ("step", "state") if options.get(name)]
    if not parts:
        raise ConfigError("no state is named", hint='Write .option("state", "STEP"); `cutwater states` lists them.')
    return ".".join(parts)
