"""Secrets that a plan names and does not hold."""

from __future__ import annotations

import os
from pathlib import Path

from cutwater.errors import ConfigError


def secret_at(what: str, place: str) -> str:
    """The secret that lies in a variable, ``"env:NAME"``, or in a file, ``"file:/path"``.

    Args:
        what: names it, for the error.

    Raises:
        ConfigError: it is not there.
    """
    kind, _, where = place.partition(":")
    try:
        return os.environ[where] if kind == "env" else Path(where).read_text().rstrip("\n")
    except (KeyError, OSError):
        raise ConfigError(
            f"{what}: there is no {'variable' if kind == 'env' else 'file'} {where!r} here",
            hint="It must be there in the driver and wherever a worker runs.",
        ) from None
