"""Which modules go to the workers whole, and which by name."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from cutwater.runtime.spark_host import main_folder, own_modules


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module and a package, as beside a script, and a library in a folder below it."""
    for path in ("shipped_one.py", "shipped_two/__init__.py", "shipped_two/part.py", "lib/named_three.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("def f(): return 1\n")
    for folder in (tmp_path, tmp_path / "lib"):
        monkeypatch.syspath_prepend(folder)
    for name in ("shipped_one", "shipped_two.part", "named_three"):
        importlib.import_module(name)
    yield tmp_path
    for name in ("shipped_one", "shipped_two.part", "shipped_two", "named_three"):
        del sys.modules[name]


def test_what_lies_beside_the_program_is_shipped_and_what_was_found_elsewhere_goes_by_name(beside: Path):
    assert {m.__name__ for m in own_modules(beside)} == {"shipped_one", "shipped_two", "shipped_two.part"}
    assert own_modules(beside / "site-packages") == []


def test_an_installed_program_has_no_modules_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "__main__", pytest)
    assert main_folder() is None


def test_the_folder_of_a_script(tmp_path: Path):
    (tmp_path / "script.py").write_text("from cutwater.runtime.spark_host import main_folder\nprint(main_folder())\n")
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path)
