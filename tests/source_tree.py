"""The package's source as data, for the tests that hold it to its own rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

PACKAGE = "cutwater"
ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"


@dataclass(frozen=True)
class Import:
    """One imported module, absolute; ``checking`` if only the type checker sees it, ``lazy`` if a function does it."""

    module: str
    line: int
    checking: bool = False
    lazy: bool = False


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def room(self) -> str:
        """First name below the package: "state", "errors" ..., or "" for the package itself."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else ""

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(_imports(self, self.tree.body, checking=False, lazy=False))


@cache
def modules() -> dict[str, Module]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted((SOURCE / PACKAGE).rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, path, path.read_text(encoding="utf-8"))
    return found


def module_of(text: str, name: str = "cutwater.state.example") -> Module:
    """A module that lies nowhere, to see that a rule can be broken."""
    return Module(name, Path("example.py"), text)


def _imports(module: Module, body: list[ast.AST], *, checking: bool, lazy: bool) -> Iterator[Import]:
    """Imports in statements and those within; an expression has none."""
    for child in body:
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, checking, lazy)
        elif isinstance(child, ast.ImportFrom):
            base = _absolute(module, child)
            for alias in child.names:
                yield Import(f"{base}.{alias.name}", child.lineno, checking, lazy)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _imports(module, child.body, checking=True, lazy=lazy)
            yield from _imports(module, child.orelse, checking=checking, lazy=lazy)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            for part in ("body", "orelse", "finalbody", "handlers", "cases"):
                within = getattr(child, part, None)
                if isinstance(within, list):
                    yield from _imports(module, within, checking=checking, lazy=lazy or inside)


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]
    for _ in range(node.level - 1):
        package = package.rpartition(".")[0]
    return f"{package}.{node.module}" if node.module else package
