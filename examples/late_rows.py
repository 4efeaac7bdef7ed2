"""Windows over rows that come in disorder: what is on time is counted, what is late is kept, nothing is lost."""

from __future__ import annotations

import pyarrow as pa

import cutwater as cw

ROWS = 20_000


def readings(start: int, count: int) -> pa.RecordBatch:
    """One reading a millisecond; every 50th comes three seconds late."""
    numbers = range(start, start + count)
    times = [n * 1000 - (3_000_000 if n % 50 == 0 else 0) for n in numbers]
    return pa.record_batch(
        {
            "sensor": [n % 7 for n in numbers],
            "at": pa.array(times, pa.timestamp("us", "UTC")),
            "value": [float(n % 100) for n in numbers],
        }
    )


def build() -> cw.Dataflow:
    flow = cw.Dataflow("late-rows")
    stream = flow.read("readings", cw.generate(readings, rows=ROWS), event_time="at", out_of_order="1s")
    per_second = stream.key_by("sensor").window("second", cw.tumbling("1s"))
    windows = per_second.aggregate("mean", n=cw.count(), mean=cw.mean("value"))
    windows.collect("windows")
    windows.late.collect("late")
    return flow


if __name__ == "__main__":
    job = build().run(interval="500ms")
    on_time = sum(job.result_table("windows").column("n").to_pylist())
    late = job.result_table("late").num_rows
    print(f"{on_time:,} on time + {late:,} late = {on_time + late:,} of {ROWS:,}")
