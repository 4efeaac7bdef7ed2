"""Settings as users write them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import msgspec

from cutwater.config import RENAMED_SETTINGS, JobConfig, parse_duration_ms
from cutwater.errors import ConfigError, did_you_mean
from cutwater.protocol.protocols import PROTOCOLS


def make_config(settings: dict[str, Any]) -> JobConfig:
    """Settings as users write them to a ``JobConfig``.

    Raises:
        ConfigError: unknown name, or a value of the wrong kind.

    >>> make_config({"interval": "500ms", "parallelism": 3}).interval_ms
    500.0
    """
    known = {f.name: f for f in msgspec.structs.fields(JobConfig)}
    values: dict[str, Any] = {}
    for name, value in _renamed(settings).items():
        if f"{name}_ms" in known:
            values[f"{name}_ms"] = None if value is None else parse_duration_ms(value, name=name)
        elif name in ("trace_dir", "key_file") and value is not None:
            values[name] = str(Path(value).absolute())  # workers may live in other directories
        elif name in known:
            values[name] = {"strategy": value} if name == "restart" and isinstance(value, str) else value
        else:
            options = sorted(["checkpoint", *(n.removesuffix("_ms") for n in known)])
            raise ConfigError(f"unknown setting {name!r}", hint=did_you_mean(name, options))
    protocol = values.get("protocol", "aligned")
    if protocol not in PROTOCOLS:
        raise ConfigError(f"protocol {protocol!r} is not available", hint=f"Choose one of {', '.join(PROTOCOLS)}.")
    try:
        return msgspec.convert(msgspec.to_builtins(values), JobConfig, strict=False)
    except msgspec.ValidationError as e:
        raise ConfigError(f"a setting has the wrong type: {e}") from e


def _renamed(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings under the names that they have now; old ones still count, with a warning."""
    now: dict[str, Any] = {}
    for name, value in settings.items():
        suffix = "_ms" if name.endswith("_ms") else ""
        new = RENAMED_SETTINGS.get(name.removesuffix("_ms"))
        if new is not None:
            warnings.warn(f"the setting {name!r} is called '{new}{suffix}' now", FutureWarning, stacklevel=2)
        name = name if new is None else f"{new}{suffix}"
        if name in now:
            raise ConfigError(f"setting {name!r} is given twice", hint="An old and a new name mean the same setting.")
        now[name] = value
    return now
