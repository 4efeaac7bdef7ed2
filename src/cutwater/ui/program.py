"""Finding the dataflow in a user's file."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, TypeVar, cast

from cutwater.api.flow import Dataflow
from cutwater.errors import BuildError, ConfigError, CutwaterError, UserCodeError

_T = TypeVar("_T")


@dataclass(frozen=True)
class Program:
    """A loaded file and the dataflow in it, or the function that makes it."""

    path: Path
    module: ModuleType
    name: str
    found: Dataflow | Callable[..., Any]

    @property
    def wants_spark(self) -> bool:
        """True if the function takes a Spark session."""
        return not isinstance(self.found, Dataflow) and bool(inspect.signature(self.found).parameters)

    def dataflow(self, spark: Callable[[], Any]) -> Dataflow:
        """The dataflow; the function is called now if there is one.

        Args:
            spark: makes the session, for a function that takes one.

        Raises:
            UserCodeError: the function raised; with its own traceback.
            BuildError: it returned something else.
        """
        function = self.found
        if isinstance(function, Dataflow):
            return function
        arguments = (spark(),) if self.wants_spark else ()
        flow = _guarded(self.path, f"{self.name}() in {self.path.name}", lambda: function(*arguments))
        if not isinstance(flow, Dataflow):
            raise BuildError(
                f"{self.name}() in {self.path.name} returned a {type(flow).__name__}, not a Dataflow",
                hint="End it with: return flow.",
            )
        return flow


def load_program(target: str) -> Program:
    """Run ``FILE.py`` or ``FILE.py:name`` as a module and find its dataflow.

    The file's folder comes first on ``sys.path``, as for a script; ``__name__`` is the file's name, so that what stands
    below ``if __name__ == "__main__"`` does not run.

    Raises:
        ConfigError: no such file, or no (or more than one) dataflow to be found in it.
        UserCodeError: the file raised; with its own traceback.
    """
    path, name = _split(target)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = _import(path)
    return Program(path, module, *_find(path, module, name))


def _split(target: str) -> tuple[Path, str]:
    file, colon, name = target.rpartition(":")
    if not colon or not name.isidentifier():
        file, name = target, ""
    path = Path(file).absolute()
    if not path.is_file():
        raise ConfigError(f"no file {file!r}", hint="Give the Python file of a dataflow, for example: flights.py.")
    return path, name


def _module_name(path: Path) -> str:
    """The file's name, unless that would hide another module."""
    name = path.stem
    if name.isidentifier() and name not in sys.modules:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin == str(path):
            return name
    return "program_" + "".join(c if c.isalnum() else "_" for c in name)


def _import(path: Path) -> ModuleType:
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path.name} is not a Python file", hint="Its name must end with .py.")
    loader, module = spec.loader, importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        _guarded(path, path.name, lambda: loader.exec_module(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _find(path: Path, module: ModuleType, name: str) -> tuple[str, Dataflow | Callable[..., Any]]:
    if name:
        return name, _named(path, module, name)
    flows = {id(value): (key, value) for key, value in vars(module).items() if isinstance(value, Dataflow)}
    found = list(flows.values()) or list(_makers(module))
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigError(
            f"{path.name} has no dataflow",
            hint="Make one at its top level (flow = cw.Dataflow(...)), or name the function that returns one: "
            f"{path.name}:function.",
        )
    names = ", ".join(key for key, _ in found)
    raise ConfigError(f"{path.name} has several dataflows: {names}", hint=f"Say which: {path.name}:{found[0][0]}.")


def _named(path: Path, module: ModuleType, name: str) -> Dataflow | Callable[..., Any]:
    value = vars(module).get(name)
    if isinstance(value, Dataflow):
        return value
    if value is None:
        known = [key for key, v in vars(module).items() if isinstance(v, Dataflow)]
        known += [key for key, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        raise ConfigError(f"{path.name} has no {name!r}", hint=f"It has: {', '.join(known) or 'no dataflow'}.")
    if not inspect.isfunction(value) or len(inspect.signature(value).parameters) > 1:
        raise ConfigError(
            f"{name!r} in {path.name} is not a dataflow",
            hint="Give a variable that holds a Dataflow, or a function that returns one and takes nothing or Spark.",
        )
    return cast("Callable[..., Any]", value)


def _makers(module: ModuleType) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Functions of the file that say that they return a dataflow."""
    for key, value in vars(module).items():
        if inspect.isfunction(value) and value.__module__ == module.__name__:
            returns = cast(object, value.__annotations__.get("return"))
            text = returns if isinstance(returns, str) else getattr(returns, "__name__", "")
            if text.rpartition(".")[2] == "Dataflow" and len(inspect.signature(value).parameters) <= 1:
                yield key, value


def _guarded(path: Path, what: str, function: Callable[[], _T]) -> _T:
    """Run the user's code; errors come out with the place in the user's file, and no frame of ours."""
    try:
        return function()
    except CutwaterError as error:
        raise _located(error, path) from error
    except SyntaxError as error:
        text = "".join(traceback.format_exception_only(error)).rstrip()
        raise UserCodeError(f"{what} cannot be read\n{text}") from error
    except Exception as error:
        kept = traceback.TracebackException(type(error), error, _from_file(error.__traceback__, path))
        text = "".join(kept.format()).rstrip()
        raise UserCodeError(f"{what} raised {type(error).__name__}\n{text}") from error


def _located(error: CutwaterError, path: Path) -> CutwaterError:
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == str(path)]
    if not lines:
        return error
    return type(error)(f"{error.message} ({path.name}, line {lines[-1]})", hint=error.hint, step=error.step)


def _from_file(trace: TracebackType | None, path: Path) -> TracebackType | None:
    """The traceback from the user's file on."""
    while trace is not None and trace.tb_frame.f_code.co_filename != str(path):
        trace = trace.tb_next
    return trace
