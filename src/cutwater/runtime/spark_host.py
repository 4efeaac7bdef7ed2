"""Workers as Spark jobs: one job of one task per slot, each submitted from a thread of its own.

Spark schedules, places and supervises the processes and ships the code (the plan with the user's functions travels in
the task's closure); nothing else goes through it.  A worker that dies is first retried by Spark inside its job, which
does not queue behind other jobs; when the job itself fails, the coordinator submits it again.  One job per slot, not
one job of n tasks: in a plain ``local[n]`` session the failure of one task ends its job, and would take all n with it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from cutwater.errors import BuildError

if TYPE_CHECKING:
    from pyspark import SparkContext

    from cutwater.runtime.worker.worker import SlotArgs


_FAILED = "failed: "


_TASKS_MAX = 1_000
"""Of a slot's stage, so many attempts of its only task are looked through for the one that runs."""

_PACKING = threading.Lock()
"""Each slot has a thread, and what a program refers to (compiled functions, say) may not bear being packed by two."""


def _slot_function(args: SlotArgs) -> Callable[[Iterable[int]], Iterator[str]]:
    """The task that Spark runs in a slot.

    The program is bytes in the closure and loaded here: a module that the workers do not have is then an answer that
    the driver can show, not a task that Spark tries again ten thousand times.

    Raises:
        BuildError: something in the program cannot be sent.
    """
    from pyspark import cloudpickle

    try:
        with _PACKING:
            ship_program()
            program = cloudpickle.dumps(args)
    except Exception as e:
        raise BuildError(
            f"the program cannot be sent to the workers: {type(e).__name__}: {e}",
            step=_unsendable(args.steps),
            hint="Functions must not hold locks, open files or the Spark session; open such things inside them.",
        ) from e
    failed = _FAILED

    def slot(_: Iterable[int]) -> Iterator[str]:
        # One loop thread per worker feeds Polars small batches: a pool of its own per worker only takes cores away.
        os.environ.setdefault("POLARS_MAX_THREADS", "1")
        gc.disable()  # nothing that is imported becomes garbage
        try:
            from pyspark import cloudpickle

            from cutwater.runtime.worker.worker import run_worker

            run = partial(run_worker, cloudpickle.loads(program))
        except Exception as e:
            run = partial(str, f"{failed}{type(e).__name__}: {e}")
        finally:
            gc.enable()
        yield run()

    return slot


def _unsendable(steps: Mapping[str, object]) -> str | None:
    """The first step that cannot be sent."""
    from pyspark import cloudpickle

    for name, spec in steps.items():
        try:
            cloudpickle.dumps(spec)
        except Exception:
            return name
    return None


class SlotTask(NamedTuple):
    """The task of a slot that Spark has given a core."""

    host: str
    age_ms: float


def is_local(master: str) -> bool:
    """True if a Spark master keeps everything on this machine.  The address of any other says nothing about executors.

    >>> [is_local(m) for m in ("local", "local[4]", "local[*,3]", "local-cluster[2,2,1024]")]
    [True, True, True, True]
    >>> [is_local(m) for m in ("spark://localhost:7077", "k8s://https://127.0.0.1:6443", "yarn", "localhost")]
    [False, False, False, False]
    """
    return master == "local" or master.startswith(("local[", "local-cluster["))


def active_context() -> SparkContext | None:
    """The Spark context of this process, if there is one."""
    kind = getattr(sys.modules.get("pyspark"), "SparkContext", None)  # a client for Connect alone has none
    return None if kind is None else kind._active_spark_context


def master_of(spark: object) -> str:
    """The Spark master of a session; of ``None``, of the context that a start without one goes on with or makes."""
    try:
        context: Any = active_context() if spark is None else getattr(spark, "sparkContext", None)
    except Exception:  # a Connect session has none, and is refused later
        context = None
    return "local" if context is None else str(context.master)


class SparkHost:
    """Submits and cancels the workers of one job.

    Args:
        context: where the workers run; ``None``: the job has finished, no worker will be launched.
        group: unique name of the job; Spark's UI shows it as job group and description.
        on_end: called from a thread when a slot's Spark job ended, with the error if it failed.
    """

    def __init__(
        self, context: SparkContext | None, group: str, on_end: Callable[[int, BaseException | None], None]
    ) -> None:
        self._group = group
        self._on_end = on_end
        self._threads: list[threading.Thread] = []
        self._context: Any = context

    def launch(self, slot: int, args: SlotArgs) -> None:
        """Submit the Spark job of a slot; returns at once."""
        from pyspark import InheritableThread

        thread = InheritableThread(target=self._run, args=(slot, args), name=f"cutwater-slot-{slot}")
        thread.daemon = True
        self._threads.append(thread)
        thread.start()

    def cancel(self, slot: int) -> None:
        """Have Spark kill the slot's process (SIGKILL after some seconds): the last resort."""
        with contextlib.suppress(Exception):
            self._context.cancelJobsWithTag(self._tag(slot))

    def cancel_all(self) -> None:
        with contextlib.suppress(Exception):
            self._context.cancelJobGroup(self._group)

    def join(self, timeout_s: float) -> bool:
        """Wait until no Spark job of the group is left; False after the timeout."""
        deadline, threads = time.monotonic() + timeout_s, list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(t.is_alive() for t in threads)

    def activity(self, slots: Iterable[int]) -> dict[int, SlotTask | None]:
        """Of these slots those whose Spark job is scheduled: the task that has a core, or ``None`` where it waits."""
        context = self._context._jsc.sc()
        tracker, store = context.statusTracker(), context.statusStore()
        found: dict[int, SlotTask | None] = {}
        for slot in slots:
            for job in tracker.getJobIdsForTag(self._tag(slot)):
                info = tracker.getJobInfo(job)
                if not info.isDefined() or info.get().status().toString() != "RUNNING":
                    continue
                for stage in info.get().stageIds():
                    if (seen := tracker.getStageInfo(stage)).isDefined():
                        found[slot] = _task(store.taskList(stage, seen.get().currentAttemptId(), _TASKS_MAX))
        return found

    @property
    def address(self) -> str:
        """Address of the driver for workers: loopback if everything runs on this machine."""
        if self._context is None or is_local(str(self._context.master)):
            return "127.0.0.1"
        return str(self._context.getConf().get("spark.driver.host", "127.0.0.1"))

    def _tag(self, slot: int) -> str:
        return f"{self._group}-slot-{slot}"

    def _run(self, slot: int, args: SlotArgs) -> None:
        error: BaseException | None = None
        try:
            self._context.setJobGroup(self._group, f"{self._group} worker {slot}", interruptOnCancel=False)
            self._context.addJobTag(self._tag(slot))
            # No query: the first one of a session takes seconds for what a job of Spark's core does without.
            status: str = self._context.parallelize(range(1), 1).mapPartitions(_slot_function(args)).collect()[0]
            if status.startswith(_FAILED):
                error = RuntimeError(status.removeprefix(_FAILED))
        except BaseException as e:  # whatever ended the job, the coordinator must hear of it
            error = e
        self._on_end(slot, error)


def _task(attempts: Any) -> SlotTask | None:
    """The attempt of a slot's task that runs, of those that Spark lists."""
    for place in range(attempts.size()):
        task = attempts.apply(place)
        if task.status() == "RUNNING":
            return SlotTask(str(task.host()), max(0.0, time.time() * 1000 - task.launchTime().getTime()))
    return None


def ship_program() -> None:
    """From now on what is pickled for the workers has the modules of the program that runs here in it."""
    if (folder := main_folder()) is not None:
        ship_by_value(folder)


def ship_by_value(folder: Path, *more: ModuleType) -> None:
    """From now on Spark sends functions and classes of a program's own modules whole, instead of by name.

    A name would have to be found again on every worker, where the user's files are not installed.
    """
    from pyspark import cloudpickle

    for module in (*own_modules(folder), *more):
        cloudpickle.register_pickle_by_value(module)


def own_modules(folder: Path) -> list[ModuleType]:
    """The loaded modules that Python found because ``folder`` is the program's: workers do not look there."""
    if _installed(folder):
        return []
    return [m for name, m in list(sys.modules.items()) if name != "__main__" and _lies_in(folder, m)]


def _lies_in(folder: Path, module: ModuleType) -> bool:
    """True if the way from the folder to the module's file is the module's name."""
    file = getattr(module, "__file__", None)
    if file is None or not file.startswith(f"{folder}{os.sep}"):  # as texts: of a thousand modules hardly any does
        return False
    first = Path(file).relative_to(folder).parts[0]
    return first.partition(".")[0] == module.__name__.partition(".")[0]


def main_folder() -> Path | None:
    """Folder of the program that runs in this process; in a notebook or a shell the current one.

    ``None`` if the program is an installed one, such as a test runner.
    """
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = Path(file).absolute().parent if file else Path.cwd()
    return None if _installed(folder) or folder.is_relative_to(sys.base_prefix) else folder


def _installed(path: Path) -> bool:
    return any(part in ("site-packages", "dist-packages") for part in path.parts)
