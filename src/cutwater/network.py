"""The earlier name of ``cutwater.process_networks``, for programs that import it by that."""

from __future__ import annotations

from cutwater.process_networks import *  # noqa: F403  the same names, whatever they are
from cutwater.process_networks import __all__ as __all__
