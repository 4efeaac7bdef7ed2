"""The command line over a checkpoint directory: what it prints and with which code it exits."""

from __future__ import annotations

import json
import os
import socket
import threading

import pytest
from ui_world import run_main

from cutwater.runtime.driver.requests import watch
from cutwater.storage.job_log import JobLog
from cutwater.storage.log_entries import CheckpointCompleted, JobEnded, JobFinished
from cutwater.storage.snapshot.manifest import Manifest, StepRecord, SubtaskRecord
from cutwater.storage.snapshot.publish import publish
from cutwater.storage.snapshot.staged_input import Staged, sealed_staged
from cutwater.storage.store.local import LocalStore
from cutwater.ui.inspect import job_infos, render_jobs, verify_snapshot
from reversal import Reversal

ME = f"{socket.gethostname()}:{os.getpid()}"


def checkpoint(store, log: JobLog, id: int) -> CheckpointCompleted:
    manifest = Manifest(
        job=log.job,
        uid=log.state.uid,
        checkpoint_id=id,
        attempt=log.attempt,
        protocol="aligned",
        max_parallelism=128,
        parallelism=1,
        triggered_ms=1_000,
        completed_ms=1_010,
        steps=[StepRecord("count", "aggregate", 1)],
        subtasks=[SubtaskRecord(vertex=0, subtask=0, incarnation=0, protocol="aligned")],
        entries=[],
    )
    return publish(store, log, manifest)


def begin(store, job: str, driver: str = ME) -> JobLog:
    log = JobLog(store, job)
    log.begin_attempt(driver)
    return log


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


# ----------------------------------------------------------------------------------------------------------- list


def test_list_tells_the_jobs_apart(store):
    done = begin(store, "done")
    checkpoint(store, done, 7)
    done.append(JobFinished(1, 7, 1_010))
    begin(store, "here")
    begin(store, "there", "elsewhere:1")
    begin(store, "gone", "elsewhere:2")
    infos = job_infos(store, lambda driver: {ME: True, "elsewhere:1": None, "elsewhere:2": False}[driver])
    assert {i["job"]: i["state"] for i in infos} == {
        "done": "finished",
        "here": "running",
        "there": "unknown",
        "gone": "dead",
    }
    lines = render_jobs(infos, 66_010).splitlines()
    assert lines[0].split() == ["job", "state", "attempt", "checkpoint", "age", "size", "driver"]
    assert lines[1] == f"done   finished        1           7  1m 05s   0 B  {ME}"
    assert lines[2] == "gone   dead            1           -       -     -  elsewhere:2"


def test_list_tells_how_a_job_ended_although_its_process_lives_on(store):
    """A notebook: many jobs, one process."""
    for outcome in ("stopped", "cancelled", "failed"):
        begin(store, outcome).append(JobEnded(1, outcome, f"so it was {outcome}", 1_010))
    begin(store, "again").append(JobEnded(1, "stopped", "by the user", 1_010))
    begin(store, "again")
    infos = job_infos(store, lambda driver: True)
    assert {i["job"]: (i["state"], i["reason"]) for i in infos} == {
        "again": ("running", ""),
        "cancelled": ("cancelled", "so it was cancelled"),
        "failed": ("failed", "so it was failed"),
        "stopped": ("stopped", "so it was stopped"),
    }
    assert render_jobs(infos, 66_010).splitlines()[5:] == ["failed: so it was failed"]


def test_list_of_a_damaged_job_names_the_file_and_shows_the_others(store, tmp_path, capfd):
    begin(store, "good")
    begin(store, "bad")
    (tmp_path / "bad" / "log" / "000000000002.json").write_bytes(b"torn")
    code, out, _ = run_main(capfd, "list", tmp_path)
    assert code == 5
    assert out.splitlines()[1].startswith("bad   damaged")
    assert out.splitlines()[2].startswith("good  running")
    assert out.splitlines()[3].startswith("bad: log entry bad/log/000000000002.json is damaged")


def test_list_as_json_and_of_nothing(store, tmp_path, capfd):
    assert run_main(capfd, "list", tmp_path)[:2] == (0, "no jobs\n")
    begin(store, "here")
    code, out, _ = run_main(capfd, "list", tmp_path, "--json")
    assert (code, json.loads(out)[0]["job"]) == (0, "here")


def test_looking_makes_nothing(tmp_path, capfd):
    code, _, err = run_main(capfd, "list", tmp_path / "nope")
    assert code == 2
    assert "error: no folder" in err
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------ inspect, verify


@pytest.mark.parametrize(
    ("address", "id"), [("", 3), ("/job", 3), ("/job/", 3), ("/job@2", 2), ("/job/chk-2", 2), ("/job/chk-2/", 2)]
)
def test_inspect_finds_a_checkpoint_by_each_of_its_addresses(store, tmp_path, capfd, address, id):
    log = begin(store, "job")
    for n in (1, 2, 3):
        checkpoint(store, log, n)
    code, out, _ = run_main(capfd, "inspect", f"{tmp_path}{address}", "--json")
    assert (code, json.loads(out)["checkpoint_id"]) == (0, id)
    code, out, _ = run_main(capfd, "inspect", f"file://{tmp_path}{address}")
    assert out.startswith(f"checkpoint {id} of job\n")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("", "holds 2 jobs\nhint: Say which: "),
        ("/jb", "no job and no savepoint at '{}/jb'\nhint: There are: job, other."),
        ("/job@9", "no completed checkpoint 9\nhint: There are: 1."),
        ("/job@x", "'x' in '{}/job@x' is no checkpoint id"),
    ],
)
def test_an_address_of_nothing_is_answered_with_what_there_is(store, tmp_path, capfd, address, message):
    checkpoint(store, begin(store, "job"), 1)
    begin(store, "other")
    code, out, err = run_main(capfd, "inspect", f"{tmp_path}{address}")
    assert (code, out) == (2, "")
    assert message.format(tmp_path) in err


def test_another_kind_of_store_is_refused(capfd):
    code, _, err = run_main(capfd, "inspect", "ftp://server/job")
    assert code == 2
    assert "no store for 'ftp://server/job'" in err


def test_verify_exits_with_5_and_names_the_damaged_file(store, tmp_path, capfd):
    log = begin(store, "job")
    first, _ = [checkpoint(store, log, n) for n in (1, 2)]
    assert run_main(capfd, "verify", tmp_path)[0] == 0
    manifest = tmp_path / "job" / first.path
    manifest.write_bytes(manifest.read_bytes().replace(b"aligned", b"alignee"))
    code, out, _ = run_main(capfd, "verify", tmp_path)
    assert code == 5
    assert "checkpoint 2: ok" in out
    assert "checkpoint 1: DAMAGED" in out
    assert f"  job/{first.path}: the manifest in job/{first.path} is damaged" in out
    assert run_main(capfd, "verify", tmp_path / "job@2")[0] == 0
    assert run_main(capfd, "verify", tmp_path / "job" / "chk-1", "--json")[0] == 5


def staged(store, step: str) -> None:
    content = {"part-0.parquet": b"rows", "part-1.parquet": b"more rows"}
    digests = {name: store.seal.digest("input", data) for name, data in content.items()}
    listed = Staged("n int64", {name: len(data) for name, data in content.items()}, 2, digests)
    for name, data in content.items():
        store.create(f"job/input/{step}/{name}", data)
    store.create(f"job/input/{step}/_staged.json", sealed_staged(listed, store.seal))


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("part-1.parquet", b"more r0ws", "differs from its digest"),
        ("part-1.parquet", b"more", "is too short"),
        ("part-1.parquet", None, "is missing"),
        ("_staged.json", b"{}", "is damaged"),
    ],
)
def test_verify_exits_with_5_where_staged_input_alone_is_damaged(store, tmp_path, capfd, file, content, told):
    checkpoint(store, begin(store, "job"), 1)
    staged(store, "read")
    code, out, _ = run_main(capfd, "verify", tmp_path)
    assert (code, out.splitlines()[1]) == (0, "input read: ok (2 files, 13 B)")
    path = tmp_path / "job/input/read" / file
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    code, out, _ = run_main(capfd, "verify", tmp_path)
    assert code == 5
    assert out.splitlines()[0].startswith("checkpoint 1: ok")
    assert out.splitlines()[1].startswith("input read: DAMAGED")
    assert out.splitlines()[2].startswith(f"  job/input/read/{file}: ")
    assert told in out


@pytest.mark.parametrize(
    ("place", "code"),
    [
        ("log/000000000003.json", 5),
        ("input/read/_staged.json", 5),
        ("input/read/part-0.parquet", 5),
        ("input/read", 0),
        ("control/driver.json", 0),
        ("claim.json", 0),
    ],
)
def test_a_fifo_anywhere_in_a_jobs_folder_hangs_neither_list_nor_verify(store, tmp_path, capfd, place, code):
    checkpoint(store, begin(store, "job"), 1)
    staged(store, "read")
    path = tmp_path / "job" / place
    if path.is_dir():
        path.rename(tmp_path / "moved")
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert run_main(capfd, "verify", tmp_path)[0] == code
    assert run_main(capfd, "list", tmp_path)[0] in (0, code)


def only_the_input_is_damaged(folder):
    store = LocalStore(folder)
    checkpoint(store, begin(store, "job"), 1)
    staged(store, "read")
    (folder / "job/input/read/part-1.parquet").write_bytes(b"more r0ws")
    assert not verify_snapshot(store, "job")["ok"]


@pytest.mark.parametrize("part", ["list(verify_inputs(store, job))", "any(i.problems for i in inputs)"])
def test_planted_bugs_are_found(tmp_path_factory, monkeypatch, part):
    """Staged input is not read; what is found there does not count."""
    Reversal(verify_snapshot, part, "[]", only_the_input_is_damaged).is_seen(monkeypatch, tmp_path_factory)


# --------------------------------------------------------------------------------------------------- cancel, stop


@pytest.mark.parametrize(("kind", "said"), [("cancel", "cancelled"), ("stop", "stopped"), ("rescale", "rescaled to 4")])
def test_a_running_driver_is_reached(store, tmp_path, capfd, kind, said):
    log, done = begin(store, "job"), []
    close = watch(
        store,
        "job",
        attempt=lambda: log.attempt,
        actions={
            "cancel": lambda _: done.append("cancel"),
            "stop": lambda _: done.append("stop"),
            "rescale": lambda r: done.append("rescale" if r.parallelism == 4 else f"to {r.parallelism}"),
        },
        ended=threading.Event(),
        poll_s=0.01,
    )
    code, out, _ = run_main(capfd, kind, tmp_path, "job", *(["4"] if kind == "rescale" else []))
    close()
    assert (code, done) == (0, [kind])
    assert out == f"job job {said} by its driver {ME}\n"


def test_a_savepoint_is_asked_for_with_its_place_and_answered_with_its_folder(store, tmp_path, capfd, monkeypatch):
    log, asked = begin(store, "job"), []
    monkeypatch.chdir(tmp_path)

    def perform(request):
        asked.append((request.kind, request.savepoint, request.drain))
        return f"{request.savepoint}/savepoint-job-1"

    actions = dict.fromkeys(("cancel", "stop", "rescale", "savepoint"), perform)
    close = watch(store, "job", attempt=lambda: log.attempt, actions=actions, ended=threading.Event(), poll_s=0.01)
    assert run_main(capfd, "savepoint", tmp_path, "job", "mine")[1].splitlines() == [
        f"job job saved by its driver {ME}",
        f"{tmp_path}/mine/savepoint-job-1",
    ]
    out = run_main(capfd, "stop", tmp_path, "job", "--savepoint", "/there", "--drain")[1]
    close()
    assert out.splitlines()[1] == "/there/savepoint-job-1"
    assert asked == [("savepoint", f"{tmp_path}/mine", False), ("stop", "/there", True)]
    code, _, err = run_main(capfd, "stop", tmp_path, "job", "--drain")
    assert code == 2
    assert "--savepoint TO --drain" in err


def test_without_a_driver_nothing_happens_and_that_is_said(store, tmp_path, capfd):
    begin(store, "job")
    code, _, err = run_main(capfd, "cancel", tmp_path, "job", "--timeout", "0ms")
    assert code == 1
    assert "no driver of job 'job' took the request within 0ms: nothing was done" in err
    code, _, err = run_main(capfd, "stop", tmp_path, "jb")
    assert code == 2
    assert "hint: There are: job." in err


def test_a_job_that_has_ended_is_not_asked(store, tmp_path, capfd):
    begin(store, "job").append(JobEnded(1, "stopped", "by the user", 1_010))
    code, _, err = run_main(capfd, "stop", tmp_path, "job", "--timeout", "1h")
    assert code == 1
    assert err == "error: job 'job' does not run: it was stopped\nhint: Nothing was done.\n"


# --------------------------------------------------------------------------------------------------- run, explain

PROGRAM = """
import cutwater as cw

flow = cw.Dataflow("made")
flow.read("numbers", cw.rate(10, rows=3)).write("out", cw.discard())
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program_of_test_cli.py"
    path.write_text(PROGRAM)
    return path


def test_explain_shows_the_graph_and_the_guarantees(program, capfd):
    code, out, _ = run_main(capfd, "explain", program, "--parallelism", "3")
    assert code == 0
    assert out.startswith("dataflow made\n")
    assert "Physical plan: 3 workers" in out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--interval", "soon"], 2, "interval 'soon' is not a duration\nhint: Write for example"),
        (["--set", "intervall=3s"], 2, "unknown setting 'intervall'\nhint: Did you mean 'interval'?\n"),
        (
            ["--set", "colour=3"],
            2,
            "unknown setting 'colour'\nhint: There are: accept_unsealed, aligned_timeout, ",
        ),
        (["--set", "nme"], 2, "--set 'nme' sets nothing"),
        (["--set", "num_retained=many"], 2, "a setting has the wrong type"),
        (["--parallelism", "0"], 2, "parallelism must be at least 1"),
        (["--protocol", "hope"], 2, "'hope' is not one of 'none', "),
        (["--restore", "nowhere/job"], 2, "no job and no savepoint at 'nowhere/job'"),
        (["--parallelism", "many"], 2, "not a valid integer"),
    ],
)
def test_a_wrong_setting_is_reported_before_spark_starts(program, capfd, monkeypatch, arguments, code, message):
    monkeypatch.setattr("cutwater.ui.run.session", lambda *a, **k: pytest.fail("Spark was started"))
    found, out, err = run_main(capfd, "run", program, *arguments)
    assert (found, out) == (code, "")
    assert message in err
    assert "Traceback" not in err


def test_a_traceback_is_shown_for_debugging_only(program, capfd):
    assert "Traceback" in run_main(capfd, "run", program, "--set", "nme=3", "--debug")[2]


def test_settings_reach_the_job(program, capfd, monkeypatch):
    """Parts of a setting are put together, dashes are taken for underscores."""
    seen = []
    monkeypatch.setattr("cutwater.ui.run.run_file", lambda options, view: seen.append(options) or 0)
    arguments = ["--set", "restart.attempts=3", "--set", "restart.strategy=fixed_delay", "--set", "num-retained=5"]
    assert run_main(capfd, "run", program, "--interval", "1s", "--checkpoint", "chk", *arguments)[0] == 0
    assert seen[0].settings == {
        "restart": {"attempts": "3", "strategy": "fixed_delay"},
        "num_retained": "5",
        "interval": "1s",
    }
    assert (seen[0].checkpoint, seen[0].restore) == ("chk", "latest")


def test_help_fits_80_columns(capfd):
    for command in ([], ["run"], ["list"], ["inspect"], ["verify"], ["cancel"], ["stop"], ["rescale"], ["explain"]):
        code, out, _ = run_main(capfd, *command, "--help")
        assert code == 0
        assert max(map(len, out.splitlines())) <= 80
        assert "..." not in out.replace("[ARGS]...", ""), "a summary that is cut short"


def test_version_and_unknown_commands(capfd):
    assert run_main(capfd, "--version")[:2] == (0, "cutwater, version 0.1.0\n")
    assert run_main(capfd, "bogus")[0] == 2
    assert run_main(capfd)[0] == 2


def test_a_fork_without_a_program_says_that_no_snapshot_has_one(capfd):
    code, _, err = run_main(capfd, "fork", "chk/a@7", "--name", "b")
    assert code == 2
    assert "holds state and positions, but no program" in err
    assert "cutwater fork chk/a@7 FILE.py --name JOB" in err
