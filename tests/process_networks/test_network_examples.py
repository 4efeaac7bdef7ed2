"""The examples of networks run, and say what is true."""

from __future__ import annotations

import re
import runpy

import pytest

from source_tree import ROOT


@pytest.mark.parametrize(
    ("example", "says"),
    [
        (
            "network_bank",
            r"(snapshot \d: nothing lost, [\d,]+ under way\n){3}1,000 steps after a restore: nothing lost",
        ),
        ("network_ring", r"careful: always exactly one token\ndrops: lost: 'the token'\ncopies: too many: 'the token'"),
        ("network_philosophers", r"[1-9]\d* meals, then a cycle .*: (fork-\d -> philosopher-\d -> ){5}fork-\d"),
        ("network_diffusing", r"snapshot \d+: terminated, 200 of 200 pieces done"),
    ],
)
def test_an_example_runs(example: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", [example])
    runpy.run_path(str(ROOT / "examples" / f"{example}.py"), run_name="__main__")
    assert re.search(says, capsys.readouterr().out)
