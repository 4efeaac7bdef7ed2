"""What a fault trial refuses before anything runs, and what its report says."""

from __future__ import annotations

import pytest

import cutwater as cw
from cutwater.chaos.shadow import PacedSource, Shadow
from cutwater.chaos.storm import Strike
from cutwater.chaos.trial import Report, SinkReport, Trial


def flow(source=None) -> cw.Dataflow:
    made = cw.Dataflow("job")
    made.read("in", source or cw.rate(None, rows=10)).write("out", cw.discard())
    return made


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kinds": ["kill", "burn"]}, "no fault 'burn'"),
        ({"kinds": []}, "no kind of fault"),
        ({"count": 0}, "at least 1"),
        ({"settings": {"protocol": "at_least_once"}}, "promises at-least-once"),
        ({"settings": {"interval": "never"}}, "not a duration"),
        ({"settings": {"colour": 1}}, "unknown setting"),
    ],
)
def test_what_cannot_be_tried_is_refused_with_a_hint(options, says):
    with pytest.raises(cw.ConfigError, match=says):
        Trial(flow().graph, **options)


def test_a_source_without_end_is_refused_by_its_step():
    with pytest.raises(cw.BuildError, match=r"step 'in'.*has no end"):
        Trial(flow(cw.rate(10)).graph)


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "precious").touch()
    with pytest.raises(cw.ConfigError, match="not an empty folder"):
        Trial(flow().graph, folder=tmp_path)


def test_the_users_graph_is_not_changed(tmp_path):
    graph = flow().graph
    before = dict(graph.steps)
    trial = Trial(graph, folder=tmp_path / "new", settings={"parallelism": 3})
    assert dict(graph.steps) == before
    assert trial.parallelism == 3
    specs = [step.spec for step in trial._shadowed.steps.values()]
    assert [type(spec) for spec in specs] == [PacedSource, Shadow]
    assert not (tmp_path / "new").exists()


def report(strikes, *sinks) -> Report:
    return Report("job", 2, 7, strikes, list(sinks), 1.0, 2.0, "/out")


def test_the_verdict():
    two = [Strike("kill", 0, 1.0, 300.0), Strike("slow-disk", -1, 2.0)]
    same, other = SinkReport("a", 5, 5), SinkReport("b", 5, 4, "row 3", steady=True)
    unsteady = SinkReport("c", 5, 4, "row 1", steady=False)
    assert report(two, same).verdict == "same"
    assert report(two[:1], same).verdict == "void"
    assert report(two[:1], same, other).verdict == "different"
    assert report(two, unsteady, other).verdict == "different"
    assert report(two, same, unsteady).verdict == "unsteady"
    text = str(report(two, same, other))
    assert "faults that hit: 2 of 2 (kill 1, slow-disk 1), seed 7" in text
    assert "recoveries: 1, median 0.30 s, longest 0.30 s" in text
    assert "b: 5 rows without faults, 4 with: row 3" in text
    assert "no restarts" in str(report(two[1:], same))
