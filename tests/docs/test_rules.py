"""The pages of rules and of words: what is cited is there, once, with tests that exist; old words stay away."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("src", "tests", "docs", "benchmarks", "examples", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile")
SUFFIXES = {".py", ".md", ".txt", ".java", ".html", ".js", ".sh", ""}

SHAPE = re.compile(r"(?<![\w.])[A-Z]{1,2}[0-9](?![\w\[])")
"""A code: one or two capitals and one digit, by itself.  Not ``C21`` or ``INT96``, nor numpy's ``M8[us]``."""
NAMES = {"P1", "P2", "P3", "M0", "CC0", "S3"}
"""What looks like a code and is none: processes of the worked examples, the beginning of a path in SVG, a licence, the
protocol of object stores."""
IN_TEST_NAME = re.compile(r"_([a-z]{1,2}[0-9])(?=_|$)", re.IGNORECASE)
RULE = re.compile(r"^### (\S+)\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
ROW = re.compile(r"^\| (?!word \|)([^|]+?) \| ([^|]+?) \| ([^|]*?) ?\|$", re.MULTILINE)
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

NAMES_OF_NODES = {"id", "attr", "name", "arg", "asname"}
"""Where a node of Python's syntax has a name."""

OLD_WORDS = ("gallery", "sharp", "loose")
"""Words of our own that are gone from the source; the last column of the glossary has them beside those used now."""


@dataclass(frozen=True)
class House:
    """All that is compared: texts by their paths, the two pages, and every name in the source."""

    texts: dict[str, str]
    rules: str
    glossary: str
    names: frozenset[str] = field(default_factory=frozenset)

    @property
    def sections(self) -> list[tuple[str, str]]:
        """Each rule's code and text."""
        return RULE.findall(self.rules)

    @property
    def words(self) -> list[tuple[str, str, str]]:
        """Word, meaning, earlier word.  An entry such as "base segment, delta segment" is two words."""
        rows: list[tuple[str, str, str]] = ROW.findall(self.glossary)
        return [(word, *more) for words, *more in rows for word in words.split(", ")]


@cache
def house() -> House:
    files = [p for place in PLACES for p in ([ROOT / place] if (ROOT / place).is_file() else (ROOT / place).rglob("*"))]
    own = {Path(__file__), ROOT / "docs" / "rules.md"}
    texts = {
        str(p.relative_to(ROOT)): p.read_text()
        for p in sorted(files)
        if p.is_file() and p.suffix in SUFFIXES and p not in own and "__pycache__" not in p.parts
    }
    names = frozenset(name for path, text in texts.items() if path.startswith("src/") for name in names_in(path, text))
    return House(texts, (ROOT / "docs/rules.md").read_text(), (ROOT / "docs/glossary.md").read_text(), names)


def names_in(path: str, text: str) -> Iterator[str]:
    """Names of the modules, classes, functions, arguments, variables and fields of a Python file."""
    yield from Path(path).with_suffix("").parts
    todo: list[ast.AST] = [ast.parse(text)]
    while todo:  # ast.walk takes three times as long
        for part, value in todo.pop().__dict__.items():
            if isinstance(value, ast.AST):
                if part != "ctx":
                    todo.append(value)
            elif isinstance(value, list):
                todo += [child for child in value if isinstance(child, ast.AST)]
            elif part in NAMES_OF_NODES and isinstance(value, str):
                yield value


def defined_tests(text: str) -> list[str]:
    return re.findall(r"^\s*(?:async )?def (test_\w+)", text, re.MULTILINE)


def cited_in(text: str, families: Iterable[str] = ()) -> set[str]:
    """Codes in a text, and those of ``families`` in the names of its tests."""
    named = {code.upper() for test in defined_tests(text) for code in IN_TEST_NAME.findall(test)}
    return set(SHAPE.findall(text)) - NAMES | {code for code in named if code[:-1] in families}


def cited_and_not_listed(house: House) -> Iterator[str]:
    listed = {code for code, _ in house.sections}
    families = {code[:-1] for code in listed}
    for path, text in house.texts.items():
        yield from (f"{path} cites {code}" for code in sorted(cited_in(text, families) - listed))


def without_source(house: House) -> Iterator[str]:
    yield from (f"{code} has no source" for code, text in house.sections if not re.search(r"^- Source: \w", text, re.M))


def without_test(house: House) -> Iterator[str]:
    """A rule names tests, all of them are there, and the file of at least one of them cites the rule."""
    families = {code[:-1] for code, _ in house.sections}
    for code, text in house.sections:
        named = NAMED_TEST.findall(text)
        for path, test in named:
            if test not in defined_tests(house.texts.get(path, "")):
                yield f"{code} names {path}::{test}, which is not there"
        if not any(code in cited_in(house.texts.get(path, ""), families) for path, _ in named):
            yield f"{code}: no test that it names cites it"


def listed_twice(house: House) -> Iterator[str]:
    yield from (f"{code} has {n} entries" for code, n in Counter(c for c, _ in house.sections).items() if n > 1)


def explained_twice(house: House) -> Iterator[str]:
    counted = Counter(word.lower() for word, _, _ in house.words)
    yield from (f"{word} has {n} entries" for word, n in counted.items() if n > 1)


def old_words(house: House) -> Iterator[str]:
    for name in sorted(house.names):
        spelled = f"_{'_'.join(WORD.findall(name)).lower()}_"
        yield from (f"{name} has the old word {old}" for old in OLD_WORDS if f"_{old}_" in spelled)


def old_words_without_entry(house: House) -> Iterator[str]:
    earlier = {w for _, _, column in house.words for w in re.findall(r"\w+", column.lower())}
    yield from (f"{old} is not in the glossary" for old in OLD_WORDS if not set(old.split("_")) <= earlier)


CHECKS: dict[str, Callable[[House], Iterator[str]]] = {
    "what is cited is listed": cited_and_not_listed,
    "every rule has a source": without_source,
    "every rule names tests that exist and cite it": without_test,
    "no rule has two entries": listed_twice,
    "no word has two entries": explained_twice,
    "no name in the source has an old word": old_words,
    "old words are in the glossary": old_words_without_entry,
}


def _with_rule(house: House, text: str) -> House:
    return replace(house, rules=f"{house.rules}\n### W9\n\n{text}\n")


def _with_text(house: House, text: str, path: str = "tests/test_new.py") -> House:
    return replace(house, texts={**house.texts, path: text})


def _with_word(house: House, row: str) -> House:
    return replace(house, glossary=f"{house.glossary}{row}\n")


_CITED = "def test_w9_holds():\n    pass\n"
_TEST = "Tests: `tests/test_new.py::test_w9_holds`"

BREACHES: dict[str, tuple[str, Callable[[House], House], str]] = {
    "a code of no rule": ("what is cited is listed", lambda h: _with_text(h, "# see (W9)\n"), "W9"),
    "a code of no family": ("what is cited is listed", lambda h: _with_text(h, "as Q4 says"), "Q4"),
    "a code in the name of a test": ("what is cited is listed", lambda h: _with_text(h, _CITED), "W9"),
    "a rule out of nowhere": ("every rule has a source", lambda h: _with_rule(h, _TEST), "W9"),
    "a rule without a test": (
        "every rule names tests that exist and cite it",
        lambda h: _with_rule(h, "- Source: us"),
        "W9: no test",
    ),
    "a test that is gone": (
        "every rule names tests that exist and cite it",
        lambda h: _with_rule(_with_text(h, _CITED.replace("holds", "breaks")), _TEST),
        "W9 names tests/test_new.py::test_w9_holds",
    ),
    "a test of something else": (
        "every rule names tests that exist and cite it",
        lambda h: _with_rule(_with_text(h, "def test_w8_holds(): ..."), _TEST.replace("w9", "w8")),
        "W9: no test",
    ),
    "a rule twice": (
        "no rule has two entries",
        lambda h: replace(h, rules=f"{h.rules}\n### A3\n\nAgain.\n"),
        "A3 has 2",
    ),
    "a word twice": ("no word has two entries", lambda h: _with_word(h, "| Barrier | again | |"), "barrier has 2"),
    "half an entry twice": (
        "no word has two entries",
        lambda h: _with_word(h, "| wall, wave | both | |"),
        "wave has 2",
    ),
    "an old word in a class": (
        "no name in the source has an old word",
        lambda h: replace(h, names=frozenset({"Sharper", "SharpWatermark"})),
        "SharpWatermark",
    ),
    "an old word in a module": (
        "no name in the source has an old word",
        lambda h: replace(h, names=frozenset(names_in("src/cutwater/sim/gallery.py", "x = 1"))),
        "gallery",
    ),
    "a word that nobody remembers": (
        "old words are in the glossary",
        lambda h: replace(h, glossary=h.glossary.replace("sharp watermark", "")),
        "sharp",
    ),
}


@pytest.mark.parametrize("check", CHECKS)
def test_the_house_is_in_order(check: str) -> None:
    assert list(CHECKS[check](house())) == []


@pytest.mark.parametrize("breach", BREACHES)
def test_a_breach_is_seen_and_nothing_else(breach: str) -> None:
    check, planted, told = BREACHES[breach]
    (found,) = CHECKS[check](planted(house()))
    assert told in found


def test_every_check_has_a_breach() -> None:
    assert {check for check, _, _ in BREACHES.values()} == set(CHECKS)


def test_names_of_examples_are_no_codes() -> None:
    """What the pattern lets pass, and what it does not."""
    assert cited_in("P1 sends on C21 at INT96, dtype M8[us], UTF8, v2.A3, x_A3, S3x") == set()
    assert cited_in("(A3, CL6): R0's log; rules C3-C5 and `W4`") == {"A3", "CL6", "R0", "C3", "C5", "W4"}
    assert cited_in("def test_r3_r4_of_two(): ...\ndef test_q0_of_nexmark(): ...", ("R",)) == {"R3", "R4"}


def test_the_pages_are_read_whole() -> None:
    """Patterns that match nothing would find nothing wrong."""
    assert len(house().sections) == house().rules.count("\n### ") >= 40
    assert len(ROW.findall(house().glossary)) == house().glossary.count("\n| ") - 1 > 90  # but the head of the table
    assert len(house().names) > 5_000
    assert len(house().texts) > 600


def test_the_pages_are_linked_where_readers_begin() -> None:
    for path, prefix in (("README.md", "docs/"), ("CONTRIBUTING.md", "docs/"), ("docs/architecture.md", "")):
        for page in ("rules.md", "glossary.md"):
            assert f"]({prefix}{page})" in house().texts[path], f"{path} does not link {page}"
