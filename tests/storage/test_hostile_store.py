"""What others put into a checkpoint directory: links, FIFOs, endless and inflating files; keys, and who may read."""

from __future__ import annotations

import io
import os
import pickle
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from storage_world import JOB, a_job, manifest_of

from cutwater.connectors.staging import Guard, staging_beside
from cutwater.errors import ConfigError, CorruptSnapshotError, ForeignDirectoryError, SealError, StorageError
from cutwater.storage.job_log import JobLog
from cutwater.storage.log_entries import parse_entry
from cutwater.storage.reading import choose, open_snapshot, verify_checkpoint
from cutwater.storage.snapshot.limits import SEGMENT_BYTES_MAX, check_entry, decoded
from cutwater.storage.snapshot.manifest import Entry
from cutwater.storage.snapshot.publish import publish
from cutwater.storage.snapshot.retention import list_jobs
from cutwater.storage.snapshot.savepoint import Claim
from cutwater.storage.snapshot.segment_files import load_manifest
from cutwater.storage.snapshot.staged_input import Staged, read_staged, sealed_staged, verify_inputs
from cutwater.storage.store import no_follow
from cutwater.storage.store.local import LocalStore
from cutwater.storage.store.seal import PLAIN, Kind, Seal, environment_seal, seal_of
from reversal import Reversal

KEY, OTHER = b"0123456789abcdef", b"fedcba9876543210"


def make_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the names of sockets are short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


KINDS: dict[str, Callable[[Path], None]] = {
    "fifo": os.mkfifo,
    "socket": make_socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "folder": Path.mkdir,
    "endless": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 42),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_reported_and_does_not_hang(tmp_path: Path, kind: str) -> None:
    store, log = a_job(tmp_path)
    data = tmp_path / JOB / "chk-2/1-0.data"
    data.unlink()
    KINDS[kind](data)
    report = verify_checkpoint(store, JOB, log.state.completed[0])
    assert not report.ok
    found = choose(store, JOB, log.state)
    assert found is not None
    assert found.completed.checkpoint_id == 1
    entry = max((tmp_path / JOB / "log").glob("0*"))
    entry.unlink()
    KINDS[kind](entry)
    with pytest.raises(CorruptSnapshotError, match=entry.name):
        JobLog(store, JOB).read()


def test_a_link_to_a_file_is_not_followed_though_the_right_bytes_lie_there(tmp_path: Path) -> None:
    """Somebody could change them between the look and the use, or have others read what only we may."""
    store, log = a_job(tmp_path / "root")
    for path in (tmp_path / "root" / JOB / "chk-2/1-0.data", max((tmp_path / "root" / JOB / "log").glob("0*"))):
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
        with pytest.raises(CorruptSnapshotError, match=f"{path.name} is a symbolic link, and those are not followed"):
            store.read(str(path.relative_to(tmp_path / "root")))
    assert not verify_checkpoint(store, JOB, log.state.completed[0]).ok
    with pytest.raises(CorruptSnapshotError, match="is a symbolic link"):
        JobLog(store, JOB).read()


@pytest.mark.parametrize("kind", [*KINDS, "link to a file"])
def test_what_is_no_file_is_not_written_over_and_does_not_hang(tmp_path: Path, kind: str) -> None:
    """A driver's sign of life is written over the one before: whatever lies in its place."""
    if kind == "endless":
        pytest.skip("is a file")
    store = LocalStore.open(tmp_path / "root")
    store.create("job/sign", b"alive")
    path, thesis = tmp_path / "root/job/sign", tmp_path / "thesis"
    thesis.write_text("three years of work")
    path.unlink()
    KINDS.get(kind, lambda path: path.symlink_to(thesis))(path)
    with pytest.raises(StorageError, match="job/sign"):
        store.overwrite("job/sign", b"alive")
    assert thesis.read_text() == "three years of work"


def test_a_link_to_a_folder_is_followed_by_nothing(tmp_path: Path) -> None:
    store, _ = a_job(tmp_path / "root")
    precious = tmp_path / "precious"
    (precious / "chapters").mkdir(parents=True)
    (precious / "thesis").write_text("three years of work")
    os.symlink(precious, tmp_path / "root" / JOB / "link")
    for action in (
        lambda: store.read(f"{JOB}/link/thesis"),
        lambda: store.write(f"{JOB}/link/new"),
        lambda: store.create(f"{JOB}/link/new", b""),
        lambda: store.delete(f"{JOB}/link/thesis"),
        lambda: store.delete(f"{JOB}/link/chapters"),
        lambda: store.make_folder(f"{JOB}/link/new"),
        lambda: store.names(f"{JOB}/link"),
    ):
        with pytest.raises(StorageError, match="link is a symbolic link, and those are not followed"):
            action()
    assert store.sweep(JOB) == 0
    store.delete(f"{JOB}/link")
    assert sorted(p.name for p in precious.iterdir()) == ["chapters", "thesis"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("directory", "/" + "x" * 300),
        ("directory", "/a\0b"),
        ("folder", "x" * 300),
        ("folder", "a\0b"),
        ("folder", ".."),
    ],
)
def test_a_claim_of_what_cannot_be_a_folder_is_a_warning_and_removes_nothing(
    tmp_path: Path, field: str, value: str
) -> None:
    """Was found by a random folder: a raw error of the system, at the end of a start."""
    store, _ = a_job(tmp_path / "root")
    (tmp_path / "given" / "sp").mkdir(parents=True)
    (tmp_path / "given" / "thesis").write_text("three years of work")
    Claim(store, JOB).take(str(tmp_path / "given"), "sp", "0" * 32, 1)
    path = tmp_path / "root" / JOB / "claim.json"
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | {field: value}))
    for warning in Claim(store, JOB).collect(range(100), needed=1):
        assert "stays for now" in warning
    assert sorted(p.name for p in (tmp_path / "given").iterdir()) == ["sp", "thesis"]


@pytest.mark.parametrize("address", ["sp", "sp/savepoint.json", "sp@3"])
def test_a_savepoint_that_is_a_link_to_itself_is_no_savepoint(tmp_path: Path, address: str) -> None:
    """Was found by a random folder: a raw error of the system."""
    (tmp_path / "sp").symlink_to(tmp_path / "sp")
    with pytest.raises((ConfigError, StorageError), match="sp"):
        open_snapshot(str(tmp_path / address), PLAIN)


def rewritten(path: Path, name: str, **changed: object) -> str:
    """The log entry, changed, with a digest made anew, which is returned, under another name."""
    head, _, body = path.read_bytes().split(b"\n", 2)
    line = msgspec.json.encode(msgspec.json.decode(head) | changed)
    digest = PLAIN.digest("log", line)
    (path.parent / name).write_bytes(b"\n".join([line, digest.encode(), body]))
    return digest


@pytest.mark.parametrize("base", [0, -1, -(2**63), 99])
def test_a_log_entry_whose_base_cannot_be_is_refused_before_it_is_counted_from(tmp_path: Path, base: int) -> None:
    store, _ = a_job(tmp_path)
    newest = max((tmp_path / JOB / "log").glob("0*"))
    rewritten(newest, newest.name, base=base)
    with pytest.raises(CorruptSnapshotError, match=f"{newest.name} is damaged: its base is {base}\\."):
        JobLog(store, JOB).read()


def test_a_log_of_which_trillions_of_entries_are_lost_is_refused_and_not_searched(tmp_path: Path) -> None:
    store, _ = a_job(tmp_path)
    digest = ""
    for path, seq in zip(sorted((tmp_path / JOB / "log").glob("0*"))[-2:], (10**12 - 2, 10**12 - 1), strict=True):
        digest = rewritten(path, f"{seq:012d}.json", seq=seq, previous=digest)
    read: list[str] = []
    store.read = lambda path, read=read, whole=store.read: read.append(path) or whole(path)  # type: ignore[method-assign]
    with pytest.raises(CorruptSnapshotError, match=r"more than 1000 entries before log entry .*/9{12}\.json are"):
        JobLog(store, JOB).read()
    assert len(read) < 1_100


def compressed(rows: int) -> bytes:
    sink = io.BytesIO()
    batch = pa.record_batch({"n": pa.array([0] * rows, pa.int64())})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, batch.schema, options=options) as stream:
        stream.write_batch(batch)
    return sink.getvalue()


def test_a_segment_that_would_inflate_is_refused_before_it_does() -> None:
    data = compressed(10_000_000)
    assert len(data) < 100_000
    before = pa.total_allocated_bytes()
    with pytest.raises(CorruptSnapshotError, match="compressed, as nothing is that Cutwater writes"):
        decoded(data, None, "x", "count", trusted=False)
    assert pa.total_allocated_bytes() == before


def test_offsets_that_lead_out_of_their_buffer_are_refused() -> None:
    offsets = pa.array([0, 2**30, 5], pa.int32()).buffers()[1]
    column = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"hello"))
    sink = io.BytesIO()
    batch = pa.RecordBatch.from_arrays([column], names=["x"])
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    with pytest.raises(CorruptSnapshotError, match="is not an Arrow stream"):
        decoded(sink.getvalue(), None, "x", "count", trusted=False)


@pytest.mark.parametrize(
    "numbers",
    [{"length": SEGMENT_BYTES_MAX + 1}, {"length": -1}, {"rows": 2**40}, {"offset": -1}, {"key_groups": (0, 2**40)}],
)
def test_numbers_that_cannot_be_are_refused_before_anything_is_allocated(numbers: dict[str, object]) -> None:
    whole = Entry(step="s", subtask=0, name="n", kind="base", rows=1, length=1, digest="")
    entry = msgspec.structs.replace(whole, **numbers)
    with pytest.raises(CorruptSnapshotError, match="tells of"):
        check_entry(entry, "the manifest")


# ---------------------------------------------------------------------------------------------------------------- keys


def test_every_changed_byte_of_what_is_sealed_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    store, log = a_job(tmp_path, Seal([KEY]))
    entry = max((tmp_path / JOB / "log").glob("0*"))
    body = entry.read_bytes()
    line, _, rest = body.partition(b"\n")
    forged = line.replace(b'"attempt":1', b'"attempt":7')
    entry.write_bytes(forged + b"\n" + PLAIN.digest("log", forged).encode() + b"\n" + rest.partition(b"\n")[2])
    with pytest.raises(SealError, match="is not sealed with the job's key"):
        JobLog(store, JOB).read()
    entry.write_bytes(forged + b"\n" + rest)
    with pytest.raises(CorruptSnapshotError, match="differs from its digest"):
        JobLog(store, JOB).read()
    entry.write_bytes(body)
    data = tmp_path / JOB / "chk-2/1-0.data"
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    report = verify_checkpoint(store, JOB, log.state.completed[0])
    assert "changed by somebody who does not have the key" in report.problems[0].what
    assert "hs256:" not in report.problems[0].what, "a message must not tell the right seal of forged bytes"


def test_one_kind_of_seal_does_not_stand_in_for_another() -> None:
    seal, kinds = Seal([KEY]), ("log", "manifest", "segment", "savepoint", "file", "piece", "part", "input", "request")
    made: list[Kind] = list(kinds)  # type: ignore[arg-type]
    for one in made:
        for other in made:
            assert (not seal.problem(one, b"data", seal.digest(other, b"data"))) == (one == other)


def test_the_log_of_another_job_is_refused_though_its_key_is_the_same(tmp_path: Path) -> None:
    store, _ = a_job(tmp_path, Seal([KEY]))
    (tmp_path / JOB).rename(tmp_path / "other")
    with pytest.raises(ForeignDirectoryError, match="holds the sealed log of job 'delays'"):
        JobLog(store, "other").read()


def test_a_key_is_never_shipped(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="never part of what is shipped"):
        pickle.dumps(Seal([KEY]))
    store = pickle.loads(pickle.dumps(LocalStore(tmp_path, Seal([KEY]), "group")))
    assert (store.seal.keyed, store.access) == (False, "group")
    assert KEY.decode() not in repr(Seal([KEY]))


def test_where_a_key_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_bytes(b"# newest first\n" + KEY + b"\n\n" + OTHER + b"\n")
    assert seal_of(str(file)).key_ids == Seal([KEY, OTHER]).key_ids
    assert environment_seal({"CUTWATER_KEY": KEY.decode()}).key_ids == Seal([KEY]).key_ids
    assert environment_seal({"CUTWATER_KEY_FILE": str(file)}).key_ids == Seal([KEY, OTHER]).key_ids
    assert not environment_seal({}).keyed
    with pytest.raises(ConfigError, match="both set"):
        environment_seal({"CUTWATER_KEY": "x", "CUTWATER_KEY_FILE": "y"})
    with pytest.raises(ConfigError, match="at least 16"):
        environment_seal({"CUTWATER_KEY": "short"})
    monkeypatch.delenv("CUTWATER_KEY_FILE", raising=False)
    with pytest.raises(ConfigError, match="accept_unsealed is for a job with a key"):
        seal_of(None, accept_unsealed=True)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by everybody"):
        seal_of(str(file))
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="is not a file"):
        seal_of(str(tmp_path / "pipe"))


# --------------------------------------------------------------------------------------------------------------- modes


def modes_below(folder: Path) -> set[tuple[bool, int]]:
    return {(p.is_dir(), stat.S_IMODE(p.stat().st_mode)) for p in [folder, *folder.rglob("*")]}


@pytest.mark.parametrize(("access", "file", "folder"), [("owner", 0o600, 0o700), ("group", 0o660, 0o770)])
def test_state_is_its_owners_or_the_groups_whatever_the_umask(
    tmp_path: Path, access: str, file: int, folder: int
) -> None:
    old = os.umask(0o022)
    try:
        a_job(tmp_path / "chk", access=access)
        area = staging_beside(str(tmp_path / "out"), "uid", "out", Guard(PLAIN, access))  # type: ignore[arg-type]
        area.folder.create()
    finally:
        os.umask(old)
    assert modes_below(tmp_path / "chk") == {(False, file), (True, folder)}
    assert modes_below(tmp_path / "out/_cutwater/uid") == {(True, folder)}
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o755, "the target is the user's"


# -------------------------------------------------------------------------------------------------------- staged input


@pytest.mark.parametrize("folder", ["read", "read/batch-000000000001"])
def test_with_a_key_staged_input_without_its_list_is_told_of_by_verify(tmp_path: Path, folder: str) -> None:
    """As readers refuse it; without a key a release that wrote no lists may have written it."""
    store, _ = a_job(tmp_path, Seal([KEY]))
    store.create(f"{JOB}/input/{folder}/part-0.parquet", b"rows")
    store.create(f"{JOB}/input/other.staging-0/part-0.parquet", b"a driver died over it")
    (report,) = verify_inputs(store, JOB)
    ((path, what),) = report.problems
    assert path == f"{JOB}/input/{folder}/_staged.json"
    assert "somebody removed it" in what
    assert not any(report.problems for report in verify_inputs(store.sealed(PLAIN), JOB))


@pytest.mark.parametrize("seal", [PLAIN, Seal([KEY])], ids=["plain", "sealed"])
def test_staged_input_is_verified_with_the_job(tmp_path: Path, seal: Seal) -> None:
    store, _ = a_job(tmp_path, seal)
    content = {"part-0.parquet": b"rows", "part-1.parquet": b"more rows"}
    digests = {name: PLAIN.digest("input", data) for name, data in content.items()}
    staged = Staged("n int64", {name: len(data) for name, data in content.items()}, 2, digests)
    for name, data in content.items():
        store.create(f"{JOB}/input/read/{name}", data)
    store.create(f"{JOB}/input/read/_staged.json", sealed_staged(staged, seal))
    (report,) = verify_inputs(store, JOB)
    assert (report.step, report.files, report.bytes, report.problems) == ("read", 2, 13, ())
    (tmp_path / JOB / "input/read/part-1.parquet").write_bytes(b"more r0ws")
    (report,) = verify_inputs(store, JOB)
    assert [file for file, _ in report.problems] == [f"{JOB}/input/read/part-1.parquet"]


def test_a_list_of_staged_files_of_an_older_release_is_read_and_one_with_foreign_names_is_not() -> None:
    old = b'{"columns":"n int64","files":{"part-0.parquet":4},"format":1}'
    assert read_staged("x", old, PLAIN).files == {"part-0.parquet": 4}
    with pytest.raises(CorruptSnapshotError, match="names a file that Spark does not write"):
        read_staged("x", old.replace(b"part-0.parquet", b"../secret"), PLAIN)
    with pytest.raises(SealError):
        read_staged("x", old, Seal([KEY]))


def test_a_manifest_that_names_foreign_files_is_refused(tmp_path: Path) -> None:
    store = LocalStore.open(tmp_path)
    log = JobLog(store, JOB)
    log.begin_attempt("driver")
    entry = Entry("s", 0, "n", "base", 1, 1, "", file="../../etc/passwd")
    completed = publish(store, log, manifest_of(log, 1, [entry]))
    with pytest.raises(CorruptSnapshotError, match="which is no data file of a checkpoint"):
        load_manifest(store, JOB, completed)


def test_a_link_beside_the_jobs_is_no_job_and_hides_none(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "current").symlink_to(tmp_path / "elsewhere")
    store = LocalStore(str(tmp_path / "checkpoints"))
    log = JobLog(store, "real")
    log.read()
    log.begin_attempt("driver")
    assert list_jobs(store) == ["real"]


# ----------------------------------------------------------------------------------------------------------- the alarm

REVERSALS = {
    "links to folders are followed": Reversal(
        no_follow.open_folder, "_FOLDER | os.O_NOFOLLOW", "_FOLDER", test_a_link_to_a_folder_is_followed_by_nothing
    ),
    "links to files are followed": Reversal(
        no_follow.open_to_read,
        " | os.O_NOFOLLOW",
        "",
        test_a_link_to_a_file_is_not_followed_though_the_right_bytes_lie_there,
    ),
    "a FIFO is a file": Reversal(
        no_follow.open_to_read,
        "not stat.S_ISREG(status.st_mode)",
        "False",
        lambda folder: test_what_is_no_file_is_reported_and_does_not_hang(folder, "fifo"),
    ),
    "links are written over": Reversal(
        LocalStore.overwrite,
        " | os.O_NOFOLLOW",
        "",
        lambda folder: test_what_is_no_file_is_not_written_over_and_does_not_hang(folder, "link to a file"),
    ),
    "everything is inflated": Reversal(
        decoded,
        "_refuse_compressed(buffer, alone=schema is not None)",
        "pass",
        lambda _: test_a_segment_that_would_inflate_is_refused_before_it_does(),
    ),
    "offsets are followed": Reversal(
        decoded,
        "batch.validate(full=True)",
        "pass",
        lambda _: test_offsets_that_lead_out_of_their_buffer_are_refused(),
    ),
    "log entries are not compared": Reversal(
        parse_entry,
        'not digest or seal.problem("log", body, digest, f"log entry {path}")',
        "False",
        test_every_changed_byte_of_what_is_sealed_is_refused_before_it_is_decoded,
    ),
    "modes of folders are those of the umask": Reversal(
        LocalStore._make,
        "0o700",
        "0o777",
        lambda folder: test_state_is_its_owners_or_the_groups_whatever_the_umask(folder, "owner", 0o600, 0o700),
    ),
    "modes of files are those of the umask": Reversal(
        LocalStore._open_exclusively,
        "0o600",
        "0o666",
        lambda folder: test_state_is_its_owners_or_the_groups_whatever_the_umask(folder, "owner", 0o600, 0o700),
    ),
}


@pytest.mark.parametrize("bug", REVERSALS)
def test_planted_bugs_are_found(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    REVERSALS[bug].is_seen(monkeypatch, tmp_path_factory)
