"""The earlier name of ``cutwater.process_networks``, for programs that import it by that."""

from __future__ import annotations

from cutwater.process_networks import (
    AllOf,
    AnyOf,
    Context,
    Finding,
    GlobalSnapshot,
    Network,
    PendingSnapshot,
    Process,
    Run,
    conserved,
    deadlock,
    holds,
    terminated,
    tokens,
)

__all__ = [
    "AllOf",
    "AnyOf",
    "Context",
    "Finding",
    "GlobalSnapshot",
    "Network",
    "PendingSnapshot",
    "Process",
    "Run",
    "conserved",
    "deadlock",
    "holds",
    "terminated",
    "tokens",
]
