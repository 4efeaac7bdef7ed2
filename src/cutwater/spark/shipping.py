"""Sending a user's own modules to executors that do not have them."""

from __future__ import annotations

from types import ModuleType

__all__ = ["ship_by_value"]


def ship_by_value(module: ModuleType) -> None:
    """From now on Spark sends this module's functions and classes whole, instead of by name.

    A name would have to be found again on every executor, where the user's file is not installed.
    """
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(module)
