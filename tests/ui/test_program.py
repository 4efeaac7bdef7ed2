"""Finding the dataflow in a user's file, and what a user is told when it is not there."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import click
import pytest

from cutwater.api.flow import Dataflow
from cutwater.errors import BuildError, ConfigError, UserCodeError
from cutwater.runtime.spark_host import own_modules
from cutwater.ui.program import load_program

ONE = "import cutwater as cw\nflow = cw.Dataflow('one')\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a program; what importing it changes in the interpreter is undone."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def write(text: str, name: str = "prog.py") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    yield write
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def no_spark():
    raise AssertionError("Spark was started")


def load(target) -> Dataflow:
    return load_program(str(target)).dataflow(no_spark)


def test_the_only_dataflow_needs_no_name(write):
    assert load(write(ONE + "same = flow\nother = 3\n")).name == "one"


def test_one_of_several_is_named(write):
    path = write(ONE + "second = cw.Dataflow('two')\n")
    assert load(f"{path}:second").name == "two"
    with pytest.raises(ConfigError, match=r"several dataflows: flow, second\. Say which: prog\.py:flow"):
        load(path)


def test_a_function_that_is_named_is_called(write):
    path = write("import cutwater as cw\ndef make():\n    return cw.Dataflow('made')\n")
    assert load(f"{path}:make").name == "made"


def test_a_function_that_says_it_returns_a_dataflow_needs_no_name(write):
    path = write("import cutwater as cw\ndef make() -> cw.Dataflow:\n    return cw.Dataflow('made')\ndef x(): ...\n")
    assert load(path).name == "made"


def test_a_function_may_take_the_spark_session(write):
    path = write("import cutwater as cw\ndef make(spark):\n    return cw.Dataflow(spark)\n")
    program = load_program(f"{path}:make")
    assert program.wants_spark
    assert program.dataflow(lambda: "session").name == "session"


def test_the_file_runs_as_a_module_with_its_folder_on_the_path(write):
    write("NAME = 'beside'\n", "neighbour_of_prog.py")
    text = ONE + "import neighbour_of_prog\nmodule = __name__\nassert __name__ != '__main__'\n"
    program = load_program(str(write(text + "second = cw.Dataflow(neighbour_of_prog.NAME)\n")) + ":second")
    assert program.dataflow(no_spark).name == "beside"
    assert {m.__name__ for m in own_modules(program.path.parent)} == {"prog", "neighbour_of_prog"}


@pytest.mark.parametrize("name", ["json.py", "my-flow.py", "__main__.py", f"{click.__name__}.py"])
def test_a_file_may_be_called_like_another_module(write, name):
    before = sys.modules.get(Path(name).stem)
    assert before is not None or name == "my-flow.py"
    program = load_program(str(write(ONE, name)))
    assert program.dataflow(no_spark).name == "one"
    assert sys.modules.get(Path(name).stem) is before
    assert sys.modules[program.module.__name__] is program.module


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("x = 1\n", "", r"prog\.py has no dataflow\. Make one at its top level"),
        (ONE, ":floww", r"prog\.py has no 'floww'\. It has: flow\."),
        (ONE + "def f(a, b): ...\n", ":f", "'f' in prog.py is not a dataflow"),
        (ONE + "x = 3\n", ":x", "'x' in prog.py is not a dataflow"),
    ],
)
def test_what_is_not_there_is_answered_with_what_is(write, text, name, message):
    with pytest.raises(ConfigError, match=message):
        load(f"{write(text)}{name}")


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="no file"):
        load(tmp_path / "nope.py")


def test_a_function_that_returns_something_else(write):
    path = write("def make():\n    return 3\n")
    with pytest.raises(BuildError, match=r"make\(\) in prog\.py returned a int, not a Dataflow"):
        load(f"{path}:make")


def test_an_error_of_the_file_shows_its_own_traceback_and_nothing_of_ours(write):
    path = write("def f():\n    return {}['dealy']\n\nf()\n")
    with pytest.raises(UserCodeError) as caught:
        load(path)
    lines = str(caught.value).splitlines()
    assert lines[0] == "prog.py raised KeyError"
    assert lines[-1] == "KeyError: 'dealy'"
    assert [line.strip() for line in lines if "File" in line] == [
        f'File "{path}", line 4, in <module>',
        f'File "{path}", line 2, in f',
    ]
    assert "prog" not in sys.modules, "a file that failed is not kept"


def test_a_syntax_error_shows_the_line(write):
    with pytest.raises(UserCodeError, match=r"cannot be read(.|\n)*line 2(.|\n)*SyntaxError"):
        load(write("x = 1\ny = = 2\n"))


def test_a_wrong_dataflow_is_reported_with_its_line(write):
    path = write(ONE + "flow.read('a', 3)\n")
    with pytest.raises(BuildError, match=r"not a source \(prog\.py, line 3\)") as caught:
        load(path)
    assert caught.value.step == "a"
    assert caught.value.hint


def test_a_module_made_by_hand_with_the_same_name_is_no_obstacle(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "prog", ModuleType("prog"))
    assert load(write(ONE)).name == "one"
