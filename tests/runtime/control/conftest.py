"""No test of a port leaves a thread behind."""

from __future__ import annotations

from wire_ends import no_thread_is_left

__all__ = ["no_thread_is_left"]
