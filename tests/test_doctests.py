"""The examples in docstrings are executed."""

from __future__ import annotations

import doctest
import importlib

import pytest

from source_tree import modules


def with_examples() -> list[str]:
    return [name for name, module in modules().items() if ">>> " in module.text]


@pytest.mark.parametrize("name", with_examples())
def test_the_examples_of_a_module_are_true(name: str) -> None:
    tried = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert tried.failed == 0
    assert tried.attempted > 0


def test_there_are_examples_to_try() -> None:
    assert len(with_examples()) > 100
