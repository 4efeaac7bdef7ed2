"""The physical plan: which steps share a vertex, and how rows find their subtask."""

from __future__ import annotations

import dataclasses
import random

import polars as pl
import pyarrow as pa
import pytest
from pyspark import cloudpickle

import cutwater as cw
from cutwater.errors import BuildError, InvariantError
from cutwater.plan.graph import EdgeType, Input, Link
from cutwater.plan.planner import fuse_links, make_plan, validate_plan
from cutwater.state.keys import hash_keys, key_group_owner, key_groups

FORWARD = EdgeType.FORWARD


def chains(plan):
    return [v.steps for v in plan.vertices]


def edges(plan):
    return [(e.type.value, e.source_step, e.source_output, e.target_step, e.target_input) for e in plan.edges]


class TestColumns:
    """Over an edge go the columns that are read behind it."""

    def columns(self, flow, step):
        return next(e.schema.names for e in make_plan(flow, 2).edges if e.target_step == step)

    def test_an_aggregate_gets_its_key_the_event_time_and_what_it_counts(self, flow, flights):
        totals = flights.key_by("origin").aggregate("total", n=cw.count(), far=cw.max("distance"))
        totals.write("out", cw.discard())
        assert self.columns(flow, "total") == ["scheduled", "origin", "distance"]
        assert "(4 channels; only scheduled, origin, distance)" in flow.explain()

    def test_a_window_gets_whole_rows_only_if_its_late_ones_are_used(self, flow, flights):
        counts = flights.key_by("carrier").window("w", cw.tumbling("1h")).aggregate("count", n=cw.count("delay"))
        counts.write("out", cw.discard())
        assert self.columns(flow, "count") == ["scheduled", "carrier", "delay"]
        counts.late.write("lost", cw.discard())
        assert self.columns(flow, "count") == ["scheduled", "origin", "carrier", "delay", "distance"]

    def test_the_first_rows_of_a_window_are_whole(self, flow, flights):
        flights.key_by("carrier").window("w", cw.tumbling("1h")).top("t", 1, by="delay").write("out", cw.discard())
        assert len(self.columns(flow, "t")) == 5

    def test_what_two_steps_read_is_sent_to_each_by_itself(self, flow, flights):
        keyed = flights.key_by("origin")
        keyed.aggregate("a", n=cw.sum("delay")).write("x", cw.discard())
        keyed.aggregate("b", n=cw.sum("distance")).write("y", cw.discard())
        assert self.columns(flow, "a") == ["scheduled", "origin", "delay"]
        assert self.columns(flow, "b") == ["scheduled", "origin", "distance"]

    def test_a_plan_that_sends_a_column_nobody_gives_is_refused(self, flow, flights):
        flights.key_by("origin").aggregate("n", n=cw.count()).write("out", cw.discard())
        plan = make_plan(flow, 2)
        edge = plan.edges[0]
        odd = dataclasses.replace(edge, schema=edge.schema.append(pa.field("gate", pa.string())))
        with pytest.raises(InvariantError, match="carries 'gate', which step 'flights' does not give"):
            validate_plan(dataclasses.replace(plan, edges=(odd, *plan.edges[1:])))


class TestChains:
    def test_forward_neighbours_share_a_vertex_and_a_key_begins_a_new_one(self, flow, flights):
        late = flights.filter("late", pl.col("delay") > 15)
        late.key_by("origin").aggregate("counts", n=cw.count()).write("out", cw.discard())
        plan = make_plan(flow, 3, 64)
        assert chains(plan) == [("flights", "late"), ("counts", "out")]
        assert edges(plan) == [("hash", "late", 0, "counts", 0)]
        assert [v.parallelism for v in plan.vertices] == [3, 3]
        assert (plan.name, plan.parallelism, plan.max_parallelism) == ("delays", 3, 64)
        assert plan.edges[0].keys == ("origin",)
        assert len(list(plan.channels(plan.edges[0]))) == 9

    def test_a_vertex_may_be_a_tree_with_side_outputs(self, flow, flights):
        keyed = flights.key_by("origin", dead_letters="check")
        keyed.dead_letters.write("bad", cw.discard())
        flights.filter("a", pl.col("delay") > 1).write("x", cw.discard())
        keyed.aggregate("n", n=cw.count()).write("out", cw.discard())
        plan = make_plan(flow, 2)
        assert chains(plan) == [("flights", "check", "bad", "a", "x"), ("n", "out")]
        assert plan.vertices[0].links == (Link(0, 0, 1, 0), Link(1, 1, 2, 0), Link(0, 0, 3, 0), Link(3, 0, 4, 0))

    def test_another_parallelism_turns_forward_into_rebalance(self, flow, flights):
        flights.filter("f", pl.col("delay") > 1, parallelism=1).write("out", cw.discard())
        plan = make_plan(flow, 2)
        assert chains(plan) == [("flights",), ("f",), ("out",)]
        assert [e[0] for e in edges(plan)] == ["rebalance", "rebalance"]
        assert plan.parallelism == 2

    def test_the_same_parallelism_by_number_chains(self, flow, flights):
        flights.filter("f", pl.col("delay") > 1, parallelism=2).write("out", cw.discard(), parallelism=2)
        assert chains(make_plan(flow, 4)) == [("flights",), ("f", "out")]

    def test_vertices_and_edges_have_the_same_numbers_at_every_parallelism(self, flow, flights):
        keyed = flights.filter("f", pl.col("delay") > 1, parallelism=2).key_by("origin")
        keyed.aggregate("n", n=cw.count(), parallelism=3).key_by("origin").aggregate("m", m=cw.count()).write(
            "out", cw.discard(), parallelism=3
        )
        plans = [make_plan(flow, parallelism) for parallelism in (1, 2, 3, 4)]
        assert {str(chains(plan)) for plan in plans} == {str([("flights",), ("f",), ("n",), ("m",), ("out",)])}
        assert {str([e.name for e in plan.edges]) for plan in plans} == {str([e.name for e in plans[0].edges])}

    def test_a_sink_of_fixed_parallelism_gets_it(self, flow, flights):
        flights.foreach_batch("out", lambda rows, checkpoint_id: None)
        plan = make_plan(flow, 2)
        assert [v.parallelism for v in plan.vertices] == [2, 1]
        assert edges(plan) == [("rebalance", "flights", 0, "out", 0)]

    def test_rebalance_and_broadcast_are_edges_of_their_own(self, flow, flights):
        flights.rebalance().filter("f", pl.col("delay") > 1).write("x", cw.discard())
        flights.broadcast().filter("g", pl.col("delay") > 1).write("y", cw.discard())
        plan = make_plan(flow, 2)
        assert chains(plan) == [("flights",), ("f", "x"), ("g", "y")]
        assert [e[0] for e in edges(plan)] == ["rebalance", "broadcast"]

    def test_a_union_heads_a_vertex_with_one_edge_per_input(self, flow, flights):
        other = flights.filter("f", pl.col("delay") > 1)
        flights.union("u", other, flights).write("out", cw.discard())
        plan = make_plan(flow, 2)
        assert chains(plan) == [("flights", "f"), ("u", "out")]
        assert edges(plan) == [
            ("forward", "flights", 0, "u", 0),
            ("forward", "f", 0, "u", 1),
            ("forward", "flights", 0, "u", 2),
        ]

    def test_parallelism_one_has_the_same_vertices(self, flow, flights):
        flights.key_by("origin").aggregate("n", n=cw.count()).write("out", cw.discard())
        one, four = make_plan(flow, 1), make_plan(flow, 4)
        assert (chains(one), edges(one)) == (chains(four), edges(four))

    def test_the_same_program_gives_the_same_plan(self):
        def build():
            flow = cw.Dataflow("d")
            stream = flow.read("r", cw.memory([], schema="k long, v long"))
            a = stream.key_by("k").aggregate("a", n=cw.count())
            b = stream.key_by("v").aggregate("b", n=cw.count())
            a.select("a2", "n").union("u", b.select("b2", "n")).write("out", cw.discard())
            plan = make_plan(flow, 2)
            return plan.vertices, plan.edges

        assert build() == build()

    def test_more_subtasks_than_key_groups_are_refused(self, flow, flights):
        flights.filter("f", pl.col("delay") > 1, parallelism=5).write("out", cw.discard())
        with pytest.raises(BuildError, match="above max_parallelism 4") as caught:
            make_plan(flow, 2, 4)
        assert caught.value.step == "f"
        for bad in (0, 1 << 15 | 1):
            with pytest.raises(BuildError, match="is not between"):
                make_plan(flow, 1, bad)
        with pytest.raises(BuildError, match="parallelism must be"):
            make_plan(flow, 0)

    def test_a_dataflow_that_is_not_whole_has_no_plan(self, flow, flights):
        with pytest.raises(BuildError, match="writes nothing"):
            make_plan(flow, 2)


class TestKeyedAgain:
    def test_the_same_key_again_needs_no_exchange(self, flow, flights):
        counts = flights.key_by("origin").aggregate("n", n=cw.count())
        counts.filter("big", pl.col("n") > 3).key_by("origin").aggregate("top", t=cw.max("n")).write("o", cw.discard())
        plan = make_plan(flow, 2)
        assert chains(plan) == [("flights",), ("n", "big", "top", "o")]

    @pytest.mark.parametrize(
        "between",
        [
            lambda s: s.with_columns("x", origin=pl.col("origin") + "!"),
            lambda s: s.rebalance().filter("x", pl.col("n") > 3),
            lambda s: s.filter("x", pl.col("n") > 3, parallelism=1),
            lambda s: s.filter("x", pl.col("n") > 3, parallelism=1).filter("y", pl.col("n") > 4),
            lambda s: s.map("x", lambda row: row, "origin string, n long"),
            lambda s: s.rename("x", origin="n", n="origin").with_columns("y", origin=pl.col("origin").cast(pl.String)),
        ],
    )
    def test_a_key_that_changed_or_rows_that_moved_are_exchanged(self, flow, flights, between):
        counts = flights.key_by("origin").aggregate("n", n=cw.count())
        between(counts).key_by("origin").aggregate("top", t=cw.count()).write("out", cw.discard())
        (edge,) = [e for e in make_plan(flow, 2).edges if e.target_step == "top"]
        assert edge.type is EdgeType.HASH

    def test_a_stateless_step_on_a_keyed_stream_takes_its_rows_by_key(self, flow, flights):
        keyed = flights.key_by("origin").filter("f", pl.col("delay") > 3)
        keyed.key_by("origin").aggregate("n", n=cw.count()).write("out", cw.discard())
        plan = make_plan(flow, 2)
        assert chains(plan) == [("flights",), ("f", "n", "out")]
        assert edges(plan) == [("hash", "flights", 0, "f", 0)]

    def test_a_key_check_stays_beside_the_step_it_checks(self, flow):
        stream = flow.read("r", cw.memory([], schema="k long"), parallelism=1)
        keyed = stream.key_by("k", dead_letters="check")
        keyed.dead_letters.write("bad", cw.discard(), parallelism=1)
        keyed.aggregate("n", n=cw.count()).write("out", cw.discard())
        assert chains(make_plan(flow, 2)) == [("r", "check", "bad"), ("n", "out")]

    def test_another_key_or_order_of_keys_is_exchanged(self, flow, flights):
        counts = flights.key_by("origin", "carrier").aggregate("n", n=cw.count())
        for id, keys in (("a", ("origin",)), ("b", ("carrier", "origin"))):
            counts.key_by(*keys).aggregate(id, n=cw.count()).write(f"out-{id}", cw.discard())
        assert [e[0] for e in edges(make_plan(flow, 2))] == ["hash", "hash", "hash"]


class TestFusing:
    def test_neighbouring_expressions_compute_as_one(self, flow, flights):
        stream = flights.filter("a", pl.col("delay") > 1).with_columns("b", x=pl.col("delay") * 2).select("c", "x")
        stream.write("out", cw.discard())
        plan = make_plan(flow, 2)
        nodes, links = fuse_links(plan, plan.vertices[0])
        assert [n.steps for n in nodes] == [("flights",), ("a", "b", "c"), ("out",)]
        assert links == [Link(0, 0, 1, 0), Link(1, 0, 2, 0)]
        assert nodes[0].spec is plan.steps["flights"].spec
        batch = pa.record_batch({**{n: [None] * 3 for n in flights.schema.names}, "delay": [0, 1, 2]}).cast(
            flights.schema
        )
        ((output, result),) = nodes[1].spec.build().process(0, batch)
        assert (output, result.to_pydict()) == (0, {"x": [4]})

    def test_a_step_that_two_read_is_not_fused(self, flow, flights):
        first = flights.filter("a", pl.col("delay") > 1)
        first.filter("b", pl.col("delay") > 2).write("x", cw.discard())
        first.filter("c", pl.col("delay") > 3).filter("d", pl.col("delay") > 4).write("y", cw.discard())
        plan = make_plan(flow, 2)
        nodes, links = fuse_links(plan, plan.vertices[0])
        assert [n.steps for n in nodes] == [("flights",), ("a",), ("b",), ("x",), ("c", "d"), ("y",)]
        assert links == [Link(0, 0, 1, 0), Link(1, 0, 2, 0), Link(2, 0, 3, 0), Link(1, 0, 4, 0), Link(4, 0, 5, 0)]

    def test_a_step_that_another_vertex_reads_is_not_fused(self, flow, flights):
        first = flights.filter("a", pl.col("delay") > 1)
        first.filter("b", pl.col("delay") > 2).write("x", cw.discard())
        first.key_by("origin").aggregate("n", n=cw.count()).write("y", cw.discard())
        plan = make_plan(flow, 2)
        nodes, _ = fuse_links(plan, plan.vertices[0])
        assert [n.steps for n in nodes] == [("flights",), ("a",), ("b",), ("x",)]

    def test_functions_are_not_fused(self, flow, flights):
        stream = flights.filter("a", pl.col("delay") > 1).map("m", lambda r: r, flights.schema)
        stream.filter("b", pl.col("delay") > 2).write("x", cw.discard())
        plan = make_plan(flow, 2)
        assert [n.steps for n in fuse_links(plan, plan.vertices[0]).nodes] == [
            ("flights",),
            ("a",),
            ("m",),
            ("b",),
            ("x",),
        ]


def test_a_plan_travels_to_the_workers(flow, flights):
    stream = flights.filter("a", pl.col("delay") > 1).enrich("e", pa.table({"carrier": ["AA"], "x": [1]}), on="carrier")
    stream.map("m", lambda row: row, "origin string, scheduled timestamp_ntz, delay long").key_by("origin").window(
        "w", cw.tumbling("1h")
    ).aggregate("agg", worst=cw.max("delay")).write("out", cw.discard())
    plan = make_plan(flow, 2)
    arrived = cloudpickle.loads(cloudpickle.dumps(plan))
    assert (arrived.vertices, arrived.edges, list(arrived.steps)) == (plan.vertices, plan.edges, list(plan.steps))
    validate_plan(arrived)
    batch = pa.RecordBatch.from_pylist([{"delay": d} for d in (0, 5)], schema=flights.schema)
    assert arrived.steps["a"].spec.build().process(0, batch)[0][1].column("delay").to_pylist() == [5]


class TestValidation:
    """Plans that the planner does not make are seen to be wrong."""

    @pytest.fixture
    def plan(self, flow, flights):
        flights.filter("f", pl.col("delay") > 1).key_by("origin").aggregate("n", n=cw.count()).write("o", cw.discard())
        return make_plan(flow, 2)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda p: {"vertices": p.vertices[:1]}, "do not lie in exactly one vertex"),
            (lambda p: {"edges": (dataclasses.replace(p.edges[0], index=7),)}, "edge 7 stands at place 0"),
            (lambda p: {"edges": (dataclasses.replace(p.edges[0], target_step="o"),)}, "ends inside a chain"),
            (lambda p: {"edges": (dataclasses.replace(p.edges[0], source_step="o"),)}, "begins outside its vertex"),
            (lambda p: {"edges": (dataclasses.replace(p.edges[0], keys=()),)}, "has no keys"),
            (lambda p: {"edges": (dataclasses.replace(p.edges[0], keys=("x",)),)}, "has no column 'x'"),
            (
                lambda p: {
                    "edges": (dataclasses.replace(p.edges[0], type=EdgeType.FORWARD),),
                    "vertices": (dataclasses.replace(p.vertices[0], parallelism=1), p.vertices[1]),
                },
                "joins parallelism 1 and 2",
            ),
            (
                lambda p: {"vertices": (dataclasses.replace(p.vertices[0], links=()), p.vertices[1])},
                "does not feed each of its steps",
            ),
            (
                lambda p: {"steps": {**p.steps, "f": dataclasses.replace(p.steps["f"], outputs=p.steps["n"].outputs)}},
                "promises other rows",
            ),
            (
                lambda p: {
                    "steps": {
                        **p.steps,
                        "flights": dataclasses.replace(p.steps["flights"], outputs=p.steps["n"].outputs),
                    }
                },
                "input 0 of step 'f' brings other rows",
            ),
            (
                lambda p: {
                    "steps": {**p.steps, "f": dataclasses.replace(p.steps["f"], inputs=(Input("x", 0, FORWARD),))}
                },
                "reads output 0 of step 'x', which is not there",
            ),
        ],
    )
    def test_a_broken_plan_is_a_bug_of_ours(self, plan, change, message):
        validate_plan(plan)
        with pytest.raises(InvariantError, match=message):
            validate_plan(dataclasses.replace(plan, **change(plan)))


# ------------------------------------------------------------------------------------- placement, by running the plan

ROWS = 40


def random_program(rng: random.Random) -> cw.Dataflow:
    """Keyed and stateless steps at random, at random parallelisms, with keys changed or moved now and then."""
    flow = cw.Dataflow("random")
    stream = flow.read("read", cw.memory([], schema="k long, v long"), parallelism=rng.choice([None, 1]))
    for n in range(rng.randint(4, 10)):
        parallelism = rng.choice([None] * 10 + [1, 3])
        kind = rng.choice(
            ["aggregate", "aggregate", "aggregate", "filter", "keep", "swap", "change", "rebalance", "map"]
        )
        id = f"{kind}-{n}"
        if kind == "aggregate":
            keys = rng.choice([("k",), ("k",), ("k",), ("v",), ("k", "v")])
            stream = stream.key_by(*keys).aggregate(
                id, parallelism=parallelism, **{c: cw.last(c) for c in ("k", "v") if c not in keys}, n=cw.count()
            )
        elif kind == "filter":
            stream = stream.filter(id, pl.col("k") >= 0, parallelism=parallelism)
        elif kind == "keep":
            stream = stream.select(id, "v", "k", parallelism=parallelism)
        elif kind == "swap":
            stream = stream.rename(id, {"k": "v", "v": "k"}, parallelism=parallelism)
        elif kind == "change":
            stream = stream.with_columns(id, k=pl.col("k") + 1, parallelism=parallelism)
        elif kind == "rebalance":
            stream = stream.rebalance()
        else:
            stream = stream.map(id, lambda row: row, "k long, v long", parallelism=parallelism)
    stream.write("out", cw.discard())
    return flow


def owner(row: dict, keys: tuple[str, ...], parallelism: int, max_parallelism: int) -> int:
    hashes = hash_keys([pa.array([row[k]], pa.int64()) for k in keys])
    return key_group_owner(int(key_groups(hashes, max_parallelism)[0]), parallelism, max_parallelism)


def run_and_find_misplaced(flow: cw.Dataflow, plan) -> list[str]:
    """Carry rows through the plan, step by step, and name keyed steps that see a row of another subtask's key."""
    parallelism = {id: v.parallelism for v in plan.vertices for id in v.steps}
    incoming = {e.target_step: e for e in plan.edges}
    rows = {"read": [(i % parallelism["read"], {"k": i, "v": (i * 7) % 11}) for i in range(ROWS)]}
    misplaced = []
    for step in list(plan.steps.values())[1:]:
        source, edge = step.inputs[0], incoming.get(step.id)
        here = []
        for number, (subtask, row) in enumerate(rows[source.step]):
            if edge is not None and edge.type is EdgeType.HASH:
                subtask = owner(row, edge.keys, parallelism[step.id], plan.max_parallelism)
            elif edge is not None and edge.type is EdgeType.REBALANCE:
                subtask = number % parallelism[step.id]
            here.append((subtask, row))
        if step.kind == "aggregate":
            for subtask, row in here:
                if subtask != owner(row, source.keys, parallelism[step.id], plan.max_parallelism):
                    misplaced.append(step.id)
        change = step.kind == "with_columns"
        swap = step.kind == "rename"
        rows[step.id] = [
            (s, {"k": r["v"], "v": r["k"]} if swap else {"k": r["k"] + 1, "v": r["v"]} if change else r)
            for s, r in here
        ]
    return misplaced


def test_every_keyed_step_sees_only_keys_of_its_own_subtask():
    saved = 0
    for seed in range(150):
        flow = random_program(random.Random(seed))
        plan = make_plan(flow, 2, 16)
        assert run_and_find_misplaced(flow, plan) == [], f"seed {seed}"
        keyed = [s for s in plan.steps.values() if s.kind == "aggregate"]
        exchanged = {e.target_step for e in plan.edges if e.type is EdgeType.HASH}
        saved += sum(s.id not in exchanged for s in keyed)
    assert saved > 30  # the shortcut was there to go wrong
