"""Connectors by name: ours, those of other packages, and what is wrong with some."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import connector_page
import cutwater as cw
from cutwater.connectors import registry
from cutwater.entry_points import CONNECTORS, STORES, package_of, provided
from cutwater.errors import BuildError, ConfigError
from cutwater.storage.store.opening import open_store
from cutwater.ui.cli import cli
from source_tree import ROOT


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder of installed packages, with that of the page."""
    connector_page.write(tmp_path)
    connector_page.install(tmp_path)
    with connector_page.importable(tmp_path):
        yield tmp_path


def install(place: Path, name: str, group: str, **points: str) -> None:
    connector_page.say_installed(place, name, "0.3", {group: points})


def listed() -> dict[tuple[str, str], registry.Connector]:
    return {(one.name, one.package): one for one in registry.connectors()}


def test_a_connector_of_another_package_is_found_by_its_name(place: Path) -> None:
    assert connector_page.PACKAGE not in sys.modules
    queue = cw.connector("queue")
    made = queue("q.db", "clicks")
    assert (made.as_source().table, made.as_sink().guarantee) == ("clicks", "exactly-once")


def test_ours_are_found_as_well() -> None:
    for name in registry.OWN:
        assert cw.connector(name) is getattr(cw, name)


def test_an_unknown_one_names_what_is_installed(place: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"no connector 'queu' is installed. Did you mean 'queue'\? There are: .*kafka.*queue"
    ):
        cw.connector("queu")
    assert connector_page.PACKAGE not in sys.modules, "nothing is loaded that was not asked for"


def test_a_broken_package_is_named_and_others_are_not_concerned(place: Path) -> None:
    (place / "breaks.py").write_text("import no_such_module")
    install(place, "cutwater-broken", CONNECTORS, broken="breaks:make", absent="cutwater_queue:no_such_name")
    (place / "half_removed-1.0.dist-info").mkdir()
    (place / "bad-1.0.dist-info").mkdir()
    (place / "bad-1.0.dist-info" / "METADATA").write_text("Name: bad\nVersion: 1.0\n")
    (place / "bad-1.0.dist-info" / "entry_points.txt").write_text("[cutwater.connectors]\nno equals sign\n")
    with pytest.raises(
        ConfigError, match=r"the package cutwater-broken 0.3 provides 'broken', .* No module named 'no_such"
    ):
        cw.connector("broken")
    with pytest.raises(ConfigError, match=r"cutwater-broken 0.3 provides 'absent', .* has no attribute 'no_such_name'"):
        cw.connector("absent")
    assert cw.connector("queue")
    found = listed()
    assert "No module named" in found["broken", "cutwater-broken"].problem
    assert found["queue", "cutwater-queue"].problem == ""


def test_two_packages_of_one_name_are_both_named(place: Path) -> None:
    install(place, "other", CONNECTORS, queue="cutwater_queue:queue", kafka="cutwater_queue:queue")
    with pytest.raises(ConfigError, match=r"several packages provide 'queue': cutwater-queue 1.0, other 0.3"):
        cw.connector("queue")
    assert cw.connector("kafka") is cw.kafka
    assert "of its own" in listed()["kafka", "other"].problem


def test_what_is_no_function_is_refused(place: Path) -> None:
    install(place, "other", CONNECTORS, five="cutwater_queue.sink:TYPES")
    with pytest.raises(ConfigError, match=r"other 0\.3 provides 'five', but .* is a dict"):
        cw.connector("five")


def test_the_command_lists_them(place: Path) -> None:
    made = CliRunner().invoke(cli, ["connectors", "--json"], catch_exceptions=False)
    (queue,) = [one for one in json.loads(made.output) if one["name"] == "queue"]
    assert (queue["source"], queue["sink"], queue["package"], queue["version"]) == (
        True,
        "exactly-once",
        "cutwater-queue",
        "1.0",
    )
    shown = CliRunner().invoke(cli, ["connectors"], catch_exceptions=False).output
    assert re.search(r"kafka +yes +as asked +cutwater \S+ +cutwater\[kafka\]", shown)
    assert re.search(r"queue +yes +exactly-once +cutwater-queue 1.0", shown)


def test_a_missing_extra_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not listed()["kafka", "cutwater"].missing
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    shown = CliRunner().invoke(cli, ["connectors"], catch_exceptions=False).output
    assert "cutwater[kafka], which is missing" in shown


def test_a_missing_extra_is_said_where_the_connector_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(BuildError, match=r"pip install 'cutwater\[kafka\]'"):
        cw.connector("kafka")("localhost:1", "t", schema="a long").as_source().discover()


def test_a_store_of_another_package_is_opened_by_its_scheme(place: Path, tmp_path: Path) -> None:
    install(place, "cutwater-elsewhere", STORES, somewhere="store_of_tests:open_it", broken="no_such_module:x")
    (place / "store_of_tests.py").write_text(
        "from elsewhere import ElsewhereStore\n"
        "def open_it(uri, seal, access, *, make):\n    return ElsewhereStore(uri, seal, access)\n"
    )
    assert open_store("somewhere://bucket/chk").uri == "somewhere://bucket/chk"
    with pytest.raises(ConfigError, match=r"the package cutwater-elsewhere 0\.3 provides 'broken'"):
        open_store("broken://bucket/chk")
    with pytest.raises(ConfigError, match="no store for 'nowhere://x/y'"):
        open_store("nowhere://x/y")


def test_the_package_of_a_module_is_known(place: Path) -> None:
    assert package_of("cutwater_queue.sink") == ("cutwater-queue", "1.0")
    assert [one.package for one in provided(CONNECTORS) if one.name == "queue"] == ["cutwater-queue"]


# ----------------------------------------------------------------------------------------------------------- ours


def of_the_connectors() -> dict[str, object]:
    """Public names that have their home in ``cutwater.connectors``, and are no formats of messages."""
    homes = {
        name: importlib.import_module(getattr(cw, name).__module__) for name in cw.__all__ if name != "__version__"
    }
    found = {n: getattr(cw, n) for n, home in homes.items() if home.__name__.startswith("cutwater.connectors.")}
    return {n: v for n, v in found.items() if n != "connector" and not hasattr(registry.result_of(v), "messages")}


def test_every_connector_of_ours_is_in_the_registry_with_its_home() -> None:
    assert set(of_the_connectors()) == set(registry.OWN)
    for name, own in registry.OWN.items():
        assert getattr(cw, name).__module__ == own.home


@pytest.mark.parametrize("name", registry.OWN)
def test_what_the_registry_says_of_ours_is_so(name: str) -> None:
    own, made = registry.OWN[name], registry.result_of(getattr(cw, name))
    assert made is not None
    assert own.reads == (hasattr(made, "as_source") or registry.has(made, registry.SOURCE_PARTS))
    sink = registry.result_of(getattr(made, "as_sink", None)) or made
    writes = hasattr(made, "as_sink") or registry.has(made, registry.SINK_PARTS)
    assert (own.writes is not None) == writes
    if writes and sink is not made:
        assert own.writes == registry.promise(sink)


def test_the_page_has_a_row_for_each_of_them() -> None:
    page = (ROOT / "docs" / "guide" / "connectors.md").read_text()
    assert registry.table() in page, registry.table()
