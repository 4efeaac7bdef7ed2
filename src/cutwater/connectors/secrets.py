"""Secrets that a plan names and does not hold."""

from __future__ import annotations

import os
from pathlib import Path

from cutwater.errors import ConfigError


def check_named(what: str, name: str, value: str) -> None:
    """Refuse a secret that is given and not named.

    Args:
        what: names it, for the error.
        name, value: of the option.

    Raises:
        ConfigError: with how to name it.
    """
    if not value.startswith(("env:", "file:")):
        raise ConfigError(
            f"{what} holds a secret, which must not travel with the plan",
            hint=f"Say where it is: {{{name!r}: 'env:NAME'}} or 'file:/path', readable where the workers run.",
        )


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
