"""Plans of cyclic dataflows: chains cut, back-edges marked, keys in their place, snapshots that fit."""

from __future__ import annotations

import dataclasses
import random
from collections import deque

import networkx as nx
import polars as pl
import pyarrow as pa
import pytest
from pyspark import cloudpickle

import cutwater as cw
from cutwater.errors import BuildError, InvariantError
from cutwater.plan.compatibility import check_compatible, step_records
from cutwater.plan.cycles import reachable
from cutwater.plan.graph import EdgeType
from cutwater.plan.planner import fuse_links, make_plan, validate_plan
from cutwater.state.keys import hash_keys, key_group_owner, key_groups
from cutwater.storage.snapshot.manifest import Entry, Manifest

ROWS = "k long, v long"
MORE = pl.col("v") > 0


def down(stream, id, **options):
    return stream.with_columns(id, v=pl.col("v") - 1, **options).filter(f"{id}-more", MORE, **options)


@pytest.fixture
def rows(flow):
    return flow.read("in", cw.memory([], schema=ROWS))


def chains(plan):
    return [v.steps for v in plan.vertices]


def backs(plan):
    return [(e.type.value, e.source_step, e.target_step, e.target_input) for e in plan.edges if e.back]


class TestChains:
    def test_a_loop_heads_a_vertex_that_may_feed_itself(self, flow, rows):
        loop = flow.loop("loop", rows)
        loop.feed_back(down(loop, "a"))
        loop.write("out", cw.discard())
        plan = make_plan(flow, 2)
        assert chains(plan) == [("in",), ("loop", "a", "a-more", "out")]
        assert backs(plan) == [("forward", "a-more", "loop", 1)]
        assert plan.loops == (frozenset({1}),)
        assert [e.source for e in plan.loop_inputs(1)] == [1]
        assert (plan.loop_of(0), plan.loop_of(1), plan.loop_inputs(0)) == (None, 0, [])

    def test_a_hash_edge_may_be_the_back_edge(self, flow, rows):
        loop = flow.loop("loop", rows.key_by("k"))
        loop.feed_back(down(loop, "a").key_by("k"))
        loop.write("out", cw.discard())
        plan = make_plan(flow, 3)
        assert backs(plan) == [("hash", "a-more", "loop", 1)]
        (edge,) = [e for e in plan.edges if e.back]
        assert len(list(plan.channels(edge))) == 9
        assert edge.name == "a-more.0>loop.1"

    @pytest.mark.parametrize("how", ["rebalance", "broadcast"])
    def test_any_edge_may_be_the_back_edge(self, flow, rows, how):
        loop = flow.loop("loop", rows)
        loop.feed_back(getattr(down(loop, "a"), how)())
        loop.write("out", cw.discard())
        assert backs(make_plan(flow, 2)) == [(how, "a-more", "loop", 1)]

    def test_a_loop_through_a_shuffle(self, flow, rows):
        loop = flow.loop("loop", rows)
        best = loop.key_by("k").aggregate("best", v=cw.max("v"))
        loop.feed_back(down(best, "a"))
        best.write("out", cw.discard())
        plan = make_plan(flow, 2)
        assert chains(plan) == [("in",), ("loop",), ("best", "a", "a-more", "out")]
        assert [(e.type.value, e.back) for e in plan.edges] == [("forward", False), ("forward", True), ("hash", False)]
        assert plan.loops == (frozenset({1, 2}),)
        assert [e.source for e in plan.loop_inputs(2)] == [1]

    def test_another_parallelism_in_the_loop_turns_forward_into_rebalance(self, flow, rows):
        loop = flow.loop("loop", rows)
        loop.feed_back(down(loop, "a", parallelism=1))
        loop.write("out", cw.discard())
        plan = make_plan(flow, 2)
        assert backs(plan) == [("rebalance", "a-more", "loop", 1)]
        assert plan.loops == (frozenset({1, 2}),)

    def test_a_declared_loop_lies_inside_the_chain_and_its_output_goes_back(self, flow, rows):
        loop = flow.loop("loop", schema=ROWS)
        both = rows.union("u", loop)
        loop.feed_back(down(both, "a"))
        both.write("out", cw.discard())
        plan = make_plan(flow, 2)
        assert chains(plan) == [("in",), ("u", "a", "a-more", "loop", "out")]
        assert backs(plan) == [("forward", "loop", "u", 1)]

    def test_an_edge_into_one_input_of_a_join_may_go_back(self, flow, flights):
        loop = flow.loop("loop", schema=flights.schema, event_time="scheduled")
        pairs = flights.key_by("origin").join("j", loop.key_by("origin"), within=("-1h", 0))
        loop.feed_back(pairs.select("s", *flights.schema.names).filter("f", pl.col("delay") > 5))
        pairs.write("out", cw.discard())
        plan = make_plan(flow, 2)
        assert backs(plan) == [("hash", "loop", "j", 1)]
        assert chains(plan) == [("flights",), ("j", "s", "f", "loop", "out")]

    def test_two_loops_side_by_side_are_two(self, flow, rows):
        first = flow.loop("first", rows)
        first.feed_back(down(first, "a"))
        second = flow.loop("second", first)
        second.feed_back(down(second, "b"))
        second.write("out", cw.discard())
        assert make_plan(flow, 2).loops == (frozenset({1}), frozenset({2}))

    def test_nested_loops_are_one(self, flow, rows):
        outer = flow.loop("outer", rows)
        inner = flow.loop("inner", outer)
        inner.feed_back(down(inner, "a"))
        outer.feed_back(down(inner, "b"))
        inner.write("out", cw.discard())
        plan = make_plan(flow, 2)
        assert plan.loops == (frozenset({1, 2}),)
        assert plan.back_edges == [("a-more", "inner"), ("b-more", "outer")]

    def test_rows_that_go_back_leave_at_the_step_they_were_written_at(self, flow, rows):
        """Fusing goes up to the edge that closes the loop and not beyond."""
        loop = flow.loop("loop", rows)
        again = down(loop, "a")
        loop.feed_back(again)
        again.with_columns("b", v=pl.col("v") + 7).filter("c", MORE).write("out", cw.discard())
        plan = make_plan(flow, 2)
        assert [n.steps for n in fuse_links(plan, plan.vertices[1]).nodes] == [
            ("loop",),
            ("a", "a-more"),
            ("b", "c"),
            ("out",),
        ]

    def test_the_numbers_of_a_plan_without_loop_are_as_written(self, flow, rows):
        """Steps written later never come first, however few inputs they have."""
        a = rows.key_by("k").aggregate("a", v=cw.count())
        b = flow.read("late", cw.memory([], schema=ROWS)).key_by("k").aggregate("b", v=cw.count())
        a.union("u", b).write("out", cw.discard())
        assert chains(make_plan(flow, 2)) == [("in",), ("a",), ("late",), ("b",), ("u", "out")]

    def test_a_plan_with_a_loop_travels_to_the_workers(self, flow, rows):
        loop = flow.loop("loop", rows)
        loop.feed_back(down(loop, "a"))
        loop.write("out", cw.discard())
        plan = make_plan(flow, 2)
        arrived = cloudpickle.loads(cloudpickle.dumps(plan))
        validate_plan(arrived)
        assert (arrived.edges, arrived.loops) == (plan.edges, plan.loops)


# ------------------------------------------------------------------------------------------------ random programs


def random_program(rng: random.Random) -> cw.Dataflow:
    """Loops opened and closed at random around keyed and stateless steps, at random parallelisms."""
    flow = cw.Dataflow("random")
    streams = [flow.read(f"in-{n}", cw.memory([], schema=ROWS)) for n in range(rng.randint(1, 2))]
    loops = []
    for n in range(rng.randint(4, 12)):
        options = {"parallelism": rng.choice([None] * 6 + [1, 3])}
        stream = rng.choice(streams[-4:])
        if rng.random() < 0.3:
            stream = rng.choice([stream.key_by("k"), stream.rebalance(), stream.broadcast()])
        kind = rng.choice(["loop", "loop", "declared", "union", "aggregate", "aggregate", "swap", "change", "map"])
        id = f"{kind}-{n}"
        if kind == "loop":
            made = flow.loop(id, stream, **options)
            loops.append(made)
        elif kind == "declared":
            loops.append(flow.loop(id, schema=ROWS, **options))
            made = stream.union(f"{id}-u", loops[-1], **options)
        elif kind == "union":
            made = stream.union(id, rng.choice(streams), **options)
        elif kind == "aggregate":
            made = stream.key_by("k").aggregate(id, v=cw.max("v"), **options)
        elif kind == "swap":
            swapped = stream.rename(id, {"k": "v", "v": "k"}, **options)
            made = swapped.select(f"{id}-s", "k", "v", **options)
        elif kind == "change":
            made = stream.with_columns(id, k=pl.col("k") + 1, **options)
        else:
            made = stream.map(id, lambda row: row, ROWS, **options)
        streams.append(made)
    for n, loop in enumerate(loops):
        for m in range(rng.randint(1, 2)):
            made_of_it = reachable(flow.graph.successors, [loop._upstream.step])
            near = [s for s in streams if s._upstream.step in made_of_it]
            body = rng.choice(near or streams).filter(f"back-{n}-{m}", MORE)
            loop.feed_back(rng.choice([body, body, body.key_by("k"), body.rebalance(), body.broadcast()]))
    read = {i.step for s in flow.graph.steps.values() for i in s.inputs}
    for n, stream in enumerate(streams):
        if stream in loops or stream._upstream.step not in read:
            stream.write(f"out-{n}", cw.discard())
    return flow


def whole_programs(count: int):
    """Random programs that can be built, with their seeds."""
    seed = 0
    while count:
        flow = random_program(random.Random(seed))
        seed += 1
        try:
            flow.validate()
        except BuildError:
            continue
        count -= 1
        yield seed - 1, flow


def test_c1_random_loops_at_parallelism_one_to_four():
    several = crossing = hashed = 0
    for seed, flow in whole_programs(100):
        steps = nx.MultiDiGraph([(i.step, s.id) for s in flow.graph.steps.values() for i in s.inputs])
        cyclic = [c for c in nx.strongly_connected_components(steps) if len(c) > 1 or steps.has_edge(*(tuple(c) * 2))]
        for parallelism in (1, 2, 3, 4):
            plan = make_plan(flow, parallelism)
            note = f"seed {seed}, parallelism {parallelism}"
            left = nx.MultiDiGraph((e.source, e.target) for e in plan.edges if not e.back)
            left.add_nodes_from(v.index for v in plan.vertices)
            assert nx.is_directed_acyclic_graph(left), note
            sources = [v.index for v in plan.vertices if not plan.inputs(v.index)]
            assert all(plan.steps[plan.vertices[v].steps[0]].role == "source" for v in sources), note
            assert set().union(sources, *(nx.descendants(left, s) for s in sources)) == set(left), note
            for edge in plan.edges:
                if edge.back:
                    assert nx.has_path(left, edge.target, edge.source), note
                assert edge.back == ((edge.source_step, edge.target_step) in flow.graph.cycles.back_edges), note
            of_step = {frozenset(plan.vertex_of(s).index for s in c) for c in cyclic}
            assert set(plan.loops) == of_step, note
            assert all(any(e.back and e.target in loop for e in plan.edges) for loop in plan.loops), note
            hashed += any(e.back and e.type is EdgeType.HASH for e in plan.edges)
        several += len(plan.loops) > 1
        crossing += any(not loop.reducible or len(loop.back_edges) > 1 for loop in flow.graph.cycles.loops)
    assert min(several, crossing, hashed) > 10


def owner(key: int, parallelism: int, max_parallelism: int) -> int:
    groups = key_groups(hash_keys([pa.array([key], pa.int64())]), max_parallelism)
    return key_group_owner(int(groups[0]), parallelism, max_parallelism)


def misplaced(plan, rng: random.Random, hops: int) -> list[str]:
    """Carry rows round the plan, and name keyed steps that see a row of another subtask's key."""
    parallelism = {id: v.parallelism for v in plan.vertices for id in v.steps}
    waiting = deque(
        (s.id, n % parallelism[s.id], {"k": n, "v": n * 7 % 11}, hops)
        for s in plan.steps.values()
        if s.role == "source"
        for n in range(6)
    )
    wrong = []
    while waiting:
        step, subtask, row, left = waiting.popleft()
        kind = plan.steps[step].kind
        if kind == "aggregate" and subtask != owner(row["k"], parallelism[step], plan.max_parallelism):
            wrong.append(step)
        if kind == "rename":
            row = {"k": row["v"], "v": row["k"]}
        elif kind == "with_columns":
            row = {"k": row["k"] + 1, "v": row["v"]}
        vertex = plan.vertex_of(step)
        place = vertex.steps.index(step)
        ways = [(vertex.steps[link.target], [subtask]) for link in vertex.links if link.source == place]
        for edge in plan.edges:
            if edge.source_step == step:
                targets = [c.target for c in plan.channels(edge) if c.source == subtask]
                if edge.type is EdgeType.HASH:
                    targets = [owner(row["k"], parallelism[edge.target_step], plan.max_parallelism)]
                elif edge.type is EdgeType.REBALANCE:
                    targets = [rng.choice(targets)]
                ways.append((edge.target_step, targets))
        waiting += [(to, t, row, left - 1) for to, targets in ways for t in targets if left]
    return wrong


def test_keyed_steps_in_loops_see_only_keys_of_their_own_subtask():
    keyed = 0
    for seed, flow in whole_programs(40):
        plan = make_plan(flow, 2, 16)
        assert misplaced(plan, random.Random(seed), hops=7) == [], f"seed {seed}"
        inside = {id for loop in flow.graph.cycles.loops for id in loop.nodes}
        keyed += sum(s.kind == "aggregate" and s.id in inside for s in plan.steps.values())
    assert keyed > 10


# ------------------------------------------------------------------------------------------------------ validation


class TestValidation:
    """Plans that the planner does not make are seen to be wrong."""

    @pytest.fixture
    def plan(self, flow, rows):
        loop = flow.loop("loop", rows)
        best = loop.key_by("k").aggregate("best", v=cw.max("v"))
        loop.feed_back(down(best, "a"))
        best.write("out", cw.discard())
        return make_plan(flow, 2)

    def with_back(self, plan, *marked: int):
        return {"edges": tuple(dataclasses.replace(e, back=e.index in marked) for e in plan.edges)}

    def test_an_unmarked_loop(self, plan):
        self.is_wrong(plan, self.with_back(plan), "form or follow a loop that no back-edge closes")

    def test_a_marked_edge_outside_any_loop(self, plan):
        self.is_wrong(plan, self.with_back(plan, 0, 1), "from step 'in' to step 'loop' closes no loop")

    def test_a_step_with_nothing_but_back_edges(self, plan):
        self.is_wrong(plan, self.with_back(plan, 1, 2), "step 'best' has no input but back-edges")

    def test_loops_that_are_not_those_of_the_vertices(self, plan):
        self.is_wrong(plan, {"loops": ()}, "not the strongly connected vertices")

    def test_a_back_edge_inside_a_chain(self, plan):
        vertex = plan.vertices[2]
        links = (*vertex.links, vertex.links[0]._replace(source=2, target=0))
        steps = dict(plan.steps)
        steps["best"] = dataclasses.replace(
            steps["best"], inputs=(*steps["best"].inputs, dataclasses.replace(steps["out"].inputs[0], step="a-more"))
        )
        vertices = (*plan.vertices[:2], dataclasses.replace(vertex, links=links))
        extra = dataclasses.replace(plan.edges[1], index=3, target=2, target_step="best")
        change = {"steps": steps, "vertices": vertices, "edges": (*plan.edges, extra)}
        self.is_wrong(plan, change, "feed each of its steps once|holds back-edge")

    def is_wrong(self, plan, change, message):
        validate_plan(plan)
        with pytest.raises(InvariantError, match=message):
            validate_plan(dataclasses.replace(plan, **change))


# --------------------------------------------------------------------------------------------------------- explain

EXPECTED = """\
dataflow delays

Logical graph
  in      read: MemorySource, bounded
          -> (k int64, v int64)
  loop    loop
          <- in by forward
          <- a-more by forward, a back-edge
          -> (k int64, v int64)
  best    aggregate: v = max(v); state (k, v)
          <- loop by hash(k)
          -> (k int64, v int64)
  a       with_columns
          <- best by forward
          -> (k int64, v int64)
  a-more  filter
          <- a by forward
          -> (k int64, v int64)
  out     write: DiscardSink, exactly-once
          <- best by forward

Physical plan: 2 workers, 128 key groups
  [0] x2  in
        edge 0: in -- forward --> [1] loop input 0 (2 channels)
  [1] x2  loop
        edge 2: loop -- hash(k) --> [2] best input 0 (4 channels)
  [2] x2  best -> a+a-more | best -> out
        edge 1: a-more -- forward --> [1] loop input 1 (2 channels, a back-edge)

Loops
  loop, best, a, a-more
    entered at loop
    closed by a-more -> loop

Guarantees
  state   exactly-once (protocol aligned)
  output  out: exactly-once"""


def test_explain_marks_back_edges_and_lists_loops(flow, rows):
    loop = flow.loop("loop", rows)
    best = loop.key_by("k").aggregate("best", v=cw.max("v"))
    loop.feed_back(down(best, "a"))
    best.write("out", cw.discard())
    assert flow.explain() == EXPECTED


def test_explain_says_that_a_loop_has_several_entries(flow, rows):
    a = flow.loop("a", rows)
    b = flow.loop("b", rows)
    a.feed_back(down(b, "x"))
    b.feed_back(down(a, "y"))
    b.write("out", cw.discard())
    text = flow.explain()
    assert "entered at a, b (not by one head: the order of writing decides what closes it)" in text
    assert "closed by x-more -> a" in text


# --------------------------------------------------------------------------------------------------- going on from it


def manifest_of(plan, *entries: Entry) -> Manifest:
    return Manifest(
        job=plan.name,
        uid="u",
        checkpoint_id=7,
        attempt=1,
        protocol="aligned",
        max_parallelism=plan.max_parallelism,
        parallelism=plan.parallelism,
        triggered_ms=0,
        completed_ms=0,
        steps=step_records(plan),
        subtasks=[],
        entries=list(entries),
        back_edges=plan.back_edges,
    )


def program(*bodies: str, handle: str = "loop"):
    flow = cw.Dataflow("delays")
    loop = flow.loop(handle, flow.read("in", cw.memory([], schema=ROWS)))
    for body in bodies:
        loop.feed_back(down(loop, body))
    loop.write("out", cw.discard())
    return make_plan(flow, 2)


def logged(plan, rows: int, number: int = -1) -> Entry:
    edge = plan.edges[number]
    return Entry(edge.target_step, 0, edge.name, "channel", rows, 8, "d", channel=(edge.index, 0, 0))


class TestGoingOn:
    """A snapshot of a loop holds the rows that were on their way round (C4)."""

    def test_the_same_program_goes_on_and_so_does_one_with_another_loop(self):
        plan = program("a")
        manifest = manifest_of(plan, logged(plan, 5))
        check_compatible(plan, manifest)
        check_compatible(program("a", "b"), manifest)
        assert manifest.back_edges == [("a-more", "loop")]

    def test_rows_on_an_edge_that_is_gone_are_counted(self):
        plan = program("a", "b")
        manifest = manifest_of(plan, logged(plan, 5), logged(plan, 1), logged(plan, 9, 0))
        with pytest.raises(BuildError, match=r"edge b-more\.0>loop\.2 is gone, 6 rows on the way there would be lost"):
            check_compatible(program("a"), manifest)

    def test_a_loop_that_was_quiet_may_go(self):
        plan = program("a", "b")
        check_compatible(program("a"), manifest_of(plan, logged(plan, 0)))

    def test_rows_of_a_channel_are_no_state_of_their_step(self):
        """What is lost is said once, of the edge: the step at its end may go."""
        plan = program("a", handle="old")
        with pytest.raises(BuildError) as caught:
            check_compatible(program("a", handle="new"), manifest_of(plan, logged(plan, 1, 0)))
        assert str(caught.value).count("\n  - ") == 1
        assert "edge in.0>old.0 is gone, 1 row on the way" in str(caught.value)
