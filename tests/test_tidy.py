"""The house style, as far as a machine can see it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest

from source_tree import ROOT, Module, module_of, modules

FILE_LINES_MAX = 700
FUNCTION_LINES_MAX = 60

# Written in pieces, so that this file does not hold them itself.
UNFINISHED = re.compile(
    r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"]) + r")\b|"
    r"\b(?<!except )Not" + r"ImplementedError\b"
)
PRIVATE_PLACES = re.compile("|".join(["/wo" + "rk/", "/tm" + "p/cw", "/ho" + "me/"]))

TEXT_SUFFIXES = {".py", ".md", ".txt", ".toml", ".json", ".html", ".css", ".js", ".sh"}

ENTRY_POINTS = {
    "cutwater": "what users import",
    "cutwater.network": "the earlier name of cutwater.process_networks",
    "cutwater.ui.cli": "the command line (pyproject: project.scripts)",
    "cutwater.runtime.daemon": "named in the setting spark.python.daemon.module",
}


def long_files(module: Module) -> Iterator[str]:
    lines = module.text.count("\n")
    if lines > FILE_LINES_MAX:
        yield f"{module.name} has {lines} lines"


def long_functions(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f"{module.name}:{node.lineno} {node.name} has {lines} lines"


def unfinished(module: Module) -> Iterator[str]:
    for number, line in enumerate(module.text.splitlines(), start=1):
        if UNFINISHED.search(line):
            yield f"{module.name}:{number} {line.strip()}"


def without_docstring(module: Module) -> Iterator[str]:
    if not ast.get_docstring(module.tree):
        yield f"{module.name} says nothing about itself"


def printing(module: Module) -> Iterator[str]:
    """Only the user interface prints: standard output belongs to the user, and in a daemon to Spark."""
    if module.room == "ui":
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"{module.name}:{node.lineno} prints"


def empty_functions(module: Module) -> Iterator[str]:
    """A body of ``pass`` or ``...`` is a stub, except in a Protocol or an abstract method; a docstring says why."""
    for owner in ast.walk(module.tree):
        if isinstance(owner, ast.ClassDef) and any("Protocol" in ast.unparse(b) for b in owner.bases):
            continue
        for node in ast.iter_child_nodes(owner):
            if isinstance(node, ast.FunctionDef) and not any("abstract" in ast.unparse(d) for d in node.decorator_list):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                stub = isinstance(body[0], ast.Expr) and ast.unparse(body[0]) == "..." if body else False
                if stub or (body and isinstance(body[0], ast.Pass)):
                    yield f"{module.name}:{node.lineno} {node.name} does nothing and does not say why"


RULES = {
    "files are short": long_files,
    "functions are short": long_functions,
    "nothing is unfinished": unfinished,
    "every module has a docstring": without_docstring,
    "only the user interface prints": printing,
    "no function is a stub": empty_functions,
}

BREACHES = {
    "files are short": "x = 1\n" * 701,
    "functions are short": "def f():\n" + "    x = 1\n" * 60,
    "nothing is unfinished": "x = 1  # TO" + "DO later",
    "every module has a docstring": "x = 1",
    "only the user interface prints": "def f():\n    print(1)",
    "no function is a stub": "class A:\n    def f(self) -> int:\n        '''Doc.'''\n        ...",
}


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule):
    assert [breach for module in modules().values() for breach in RULES[rule](module)] == []


@pytest.mark.parametrize("rule", RULES)
def test_a_breach_of_the_rule_is_seen(rule):
    assert list(RULES[rule](module_of(BREACHES[rule])))


def test_every_module_is_used():
    """A module that nobody imports is dead: tests alone do not keep it alive."""
    all_modules = modules()
    used = set(ENTRY_POINTS)
    for module in all_modules.values():
        for i in module.imports:
            if i.module.rpartition(".")[0] != module.name:
                used |= {i.module, i.module.rpartition(".")[0]}
        used |= set(re.findall(r'"(cutwater(?:\.\w+)+)"', module.text))  # named as text: imported when first used
    packages = {name for name, m in all_modules.items() if m.path.name == "__init__.py"}
    assert sorted(set(all_modules) - packages - used) == []


def test_test_files_have_names_of_their_own():
    """Two files of one name cannot be collected together, though each runs when it is named alone."""
    names = [p.name for p in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(n for n, times in Counter(names).items() if times > 1) == []


def test_no_file_names_a_private_place():
    texts = [
        p for d in ("src", "tests", "docs", "examples", "benchmarks") for p in (ROOT / d).rglob("*") if p.is_file()
    ]
    suffixes = {".py", ".md", ".txt", ".toml", ".json", ".html", ".css", ".js", ".sh"}
    found = [str(p.relative_to(ROOT)) for p in texts if p.suffix in suffixes and PRIVATE_PLACES.search(p.read_text())]
    assert found == []


# --------------------------------------------------------------------------------------------- one class, one file


def names_in(module: Module) -> dict[str, str]:
    """Dotted names by the names that a module gives them: what it imports, and its own classes."""
    found = {n.name: f"{module.name}.{n.name}" for n in ast.walk(module.tree) if isinstance(n, ast.ClassDef)}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """A class as its dotted name: ``Machine``, ``messages.Freeze``, ``Store[int]``."""
    if isinstance(node, ast.Subscript):
        return dotted(node.value, names)
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, names)}.{node.attr}"
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def uses(node: ast.AST) -> Iterator[ast.expr]:
    """Names in a module that stand for a use: not as a base, and not as the type of something."""
    types = {"annotation", "returns", "bases"}
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and field not in types:
                if isinstance(child, ast.Name | ast.Attribute):
                    yield child
                yield from uses(child)


def continued_elsewhere(all_modules: Iterable[Module]) -> list[str]:
    """Classes that are nothing but the base of one class in another file: the first part of that class.

    A base that is made by itself or asked for (``isinstance``), an interface with several implementations, and an
    exception are none.
    """
    children: dict[str, list[str]] = {}
    used = set[str]()
    for module in all_modules:
        names = names_in(module)
        used |= {dotted(node, names) for node in uses(module.tree)}
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                for base in node.bases:
                    children.setdefault(dotted(base, names), []).append(f"{module.name}.{node.name}")
    return sorted(
        base
        for base, found in children.items()
        if base.startswith("cutwater.")
        and not base.endswith("Error")
        and base not in used
        and len(found) == 1
        and found[0].rpartition(".")[0] != base.rpartition(".")[0]
    )


def test_no_class_is_continued_in_another_file():
    assert continued_elsewhere(modules().values()) == []


BASE = module_of("class Part: ...", "cutwater.state.part")


@pytest.mark.parametrize(
    "whole",
    [
        "from cutwater.state.part import Part\nclass Whole(Part): ...",
        "from cutwater.state.part import Part as P\nclass Whole(P[int]):\n    def f(self, other: P) -> P: ...",
        "from cutwater.state import part\nclass Whole(part.Part): ...",
    ],
)
def test_a_class_that_is_continued_is_seen(whole):
    assert continued_elsewhere([BASE, module_of(whole, "cutwater.state.whole")]) == ["cutwater.state.part.Part"]


@pytest.mark.parametrize(
    "more",
    [
        "from cutwater.state.part import Part\nclass Other(Part): ...",
        "from cutwater.state.part import Part\nx = Part()",
        "from cutwater.state.part import Part\ndef f(x):\n    return isinstance(x, Part)",
    ],
)
def test_a_base_with_a_life_of_its_own_is_none(more):
    whole = module_of("from cutwater.state.part import Part\nclass Whole(Part): ...", "cutwater.state.whole")
    assert continued_elsewhere([BASE, whole, module_of(more, "cutwater.state.more")]) == []
