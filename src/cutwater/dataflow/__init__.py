"""What the user writes: streams, steps, the logical graph and the physical plan.  Building runs nothing.

flow      Dataflow: read, validate, explain, start
loop      LoopStream: feed_back                           cycles  which edges close loops, pure functions
stream    Stream: stateless steps, key_by, sinks          keyed   KeyedStream: aggregates, windows, joins
keyed_results   what their steps give: windows to fill, late rows
build     the graph under construction, ids, event time   steps, expression_steps, keyed_steps   one step each
graph     LogicalGraph and PhysicalPlan, plain values     checks  whole dataflow, guarantees
plan      from the logical to the physical graph          compatibility  the upgrade check
explain   both graphs as text                             aggregates  cw.count, cw.sum ...
"""
