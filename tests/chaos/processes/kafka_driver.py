"""A driver of its own from topic to topic: ``python kafka_driver.py FOLDER SERVERS RECOVERY PROTOCOL``.

It tells in ``told`` how it is and who its workers are, and goes on until the file ``gate`` is in the folder; started
again, it resumes.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import polars as pl

import cutwater as cw
from cutwater.spark.session import session

KEYS, PARALLELISM = 97, 2
SOURCE, OUT = "in", "out"


def flow_of(servers: str) -> cw.Dataflow:
    """Each id with the running count of its key."""
    flow = cw.Dataflow("kafka")
    rows = flow.read("in", cw.kafka(servers, SOURCE, schema="id long"))
    keyed = rows.with_columns("key", key=pl.col("id") % KEYS).key_by("key")
    counts = keyed.aggregate("count", n=cw.count(), eid=cw.last("id"))
    counts.write("out", cw.kafka(servers, OUT, key="key"))
    return flow


def main(folder: Path, servers: str, recovery: str, protocol: str) -> None:
    """Run the job until it is stopped."""
    settings = {"parallelism": PARALLELISM, "interval": "200ms", "recovery": recovery, "protocol": protocol}
    restart = {"strategy": "fixed_delay", "delay_ms": 0.0, "attempts": 1_000}
    job = flow_of(servers).start(session(PARALLELISM), checkpoint=folder / "chk", restart=restart, **settings)
    told, fresh = folder / "told", folder / "told.fresh"
    while job.is_active and not (folder / "gate").exists():
        status = job.status
        pids, reasons = [worker.pid for worker in status.workers], [event.reason for event in status.failures]
        fresh.write_text(json.dumps({"workers": pids, "status": str(status), "failures": reasons}))
        fresh.replace(told)
        time.sleep(0.05)
    if not job.is_active:
        job.await_termination()
    job.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
