"""Calls the command line as the installed script does."""

from __future__ import annotations

import sys
from unittest import mock

import pytest

from cutwater.ui.cli import main


def run_main(capfd, *arguments) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    with mock.patch.object(sys, "argv", ["cutwater", *map(str, arguments)]), pytest.raises(SystemExit) as caught:
        main()
    out, err = capfd.readouterr()
    return int(caught.value.code or 0), out, err
