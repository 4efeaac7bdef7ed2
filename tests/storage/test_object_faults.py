"""What networks, servers and administrators do to an object store: each is put right, or told with bucket and key."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from servers.object_store import KEY, SECRET, ObjectServer

from cutwater.errors import ConfigError, CorruptSnapshotError, FencedError, InDoubtError, StorageError
from cutwater.storage.job_log import JobLog
from cutwater.storage.log_entries import CheckpointCompleted
from cutwater.storage.store.bucket import PART_BYTES, Patience
from cutwater.storage.store.objects import ObjectStore
from cutwater.storage.store.opening import open_store, store_at
from object_proxy import Proxy, StaleListings, answer_lost, half_answered, late, request_lost, slow, told

QUICK = Patience(request_s=1.0, connect_s=1.0, total_s=3.0, pause_s=0.02, longest_pause_s=0.1)
LARGE = os.urandom(2 * PART_BYTES + 12_345)


@pytest.fixture
def store(bucket: str, proxy: Proxy) -> ObjectStore:
    made = ObjectStore(bucket, patience=QUICK)
    made.make()
    proxy.requests.clear()
    return made


def write(store: ObjectStore, path: str, data: bytes) -> None:
    file = store.write(path)
    for start in range(0, len(data), 1 << 20):
        file.write(data[start : start + (1 << 20)])
    store.close_durably(file)


# ------------------------------------------------------------------------------------------------ who created it


@pytest.mark.parametrize(
    "deed", [answer_lost, late(0.2), request_lost, told(503, "SlowDown"), told(500, "InternalError")]
)
def test_a_create_whose_answer_got_lost_is_ours(store: ObjectStore, proxy: Proxy, deed) -> None:
    proxy.add("put", deed, key="entry", times=1)
    assert store.create("entry", b"mine") is True
    time.sleep(0.4)
    assert store.read("entry") == b"mine"
    assert store.create("entry", b"mine") is False, "another call, whatever it writes"


def test_a_create_that_lost_its_answer_and_the_race_is_not_ours(store: ObjectStore, proxy: Proxy) -> None:
    def taken(request, forward):
        assert other.create("entry", b"the same bytes")

    other = ObjectStore(store.uri, patience=QUICK)
    proxy.add("put", taken, key="entry", times=1)
    assert store.create("entry", b"the same bytes") is False


def test_a_conflict_is_no_answer(store: ObjectStore, proxy: Proxy) -> None:
    proxy.add("put", told(409, "ConditionalRequestConflict"), key="entry", times=2)
    assert store.create("entry", b"mine") is True


def test_a_refusal_at_the_first_try_costs_no_second_look(store: ObjectStore, proxy: Proxy) -> None:
    store.create("entry", b"one")
    proxy.requests.clear()
    assert store.create("entry", b"one") is False
    assert proxy.count() == 1


def test_a_server_that_answers_nothing_leaves_it_in_doubt_until_somebody_looks(
    store: ObjectStore, proxy: Proxy
) -> None:
    proxy.add("", request_lost, key="entry")
    began_s = time.monotonic()
    with pytest.raises(InDoubtError, match=r"not known whether s3://cutwater-tests/place-\d+/entry was written"):
        store.create("entry", b"mine")
    assert time.monotonic() - began_s < 60, "and it ends"


def test_a_log_in_doubt_takes_no_more_entries_and_the_next_attempt_settles_it(store: ObjectStore, proxy: Proxy) -> None:
    log = JobLog(store, "job")
    attempt = log.begin_attempt("one")
    store.create("job/chk-1/1-0.data", b"")
    proxy.add("put", late(3.5), key="job/log/", times=1)
    proxy.add("", request_lost, key="job/log/")
    completed = CheckpointCompleted(
        checkpoint_id=1, attempt=attempt, digest="", path="chk-1/manifest-1.json", time_ms=1
    )
    with pytest.raises(StorageError):
        log.append(completed)
    assert log.in_doubt
    with pytest.raises(StorageError, match="Begin a new attempt"):
        log.append(completed)
    proxy.faults.clear()
    again = JobLog(store, "job")
    second = again.begin_attempt("two")
    time.sleep(4.0)  # the entry that was under way arrives, and finds its number taken or counts
    found = JobLog(store, "job").read()
    assert (found.attempt, found.driver) == (second, "two")


def test_two_drivers_with_lost_answers_never_both_own_a_number(store: ObjectStore, proxy: Proxy) -> None:
    logs = [JobLog(store, "job"), JobLog(ObjectStore(store.uri, patience=QUICK), "job")]
    for round_ in range(6):
        proxy.add("put", answer_lost, key="/log/", times=1)
        assert logs[round_ % 2].begin_attempt(f"driver {round_}") == round_ + 1
    entries = [name for name in store.names("job/log") if name.endswith(".json")]
    assert len(entries) == 7, "one for the job, one for each attempt"


# ---------------------------------------------------------------------------------------------- slow and short of it


@pytest.mark.parametrize("kind", ["get", "list", "put", "delete"])
def test_a_server_that_is_busy_is_asked_again(store: ObjectStore, proxy: Proxy, kind: str) -> None:
    store.create("a/x", b"one")
    proxy.add(kind, told(503, "SlowDown", "Please reduce your request rate."), times=3)
    assert store.read("a/x") == b"one"
    assert store.names("a") == ["x"]
    store.overwrite("a/y", b"two")
    store.delete("a")
    assert store.list() == []
    assert not [fault for fault in proxy.faults if fault.times], "all of them were met"


def test_a_server_that_stays_busy_is_told_with_its_own_words(store: ObjectStore, proxy: Proxy) -> None:
    proxy.add("", told(503, "SlowDown", "Please reduce your request rate."))
    with pytest.raises(
        StorageError, match=r"cannot read s3://cutwater-tests/.*/x: 503 SlowDown Please reduce"
    ) as told_:
        store.read("x")
    assert not isinstance(told_.value, CorruptSnapshotError), "nobody knows whether it is there"


def test_a_slow_answer_is_waited_for_once_more(store: ObjectStore, proxy: Proxy) -> None:
    store.create("x", b"one")
    proxy.add("get", slow(1.3), times=1)
    assert store.read("x") == b"one"


def test_half_an_answer_is_none(store: ObjectStore, proxy: Proxy) -> None:
    store.create("x", b"0123456789" * 1000)
    proxy.add("get", half_answered, times=2)
    assert store.read("x") == b"0123456789" * 1000
    assert store.read("x", 5, 5000) == (b"0123456789" * 1000)[5:5005]


def test_a_listing_that_lags_hides_no_entry_of_the_log(store: ObjectStore, proxy: Proxy) -> None:
    first = JobLog(store, "job")
    first.begin_attempt("one")
    proxy.add("list", StaleListings())
    assert JobLog(store, "job").read().attempt == 1, "seen once, and told for ever"
    first.begin_attempt("two")
    first.begin_attempt("three")
    assert JobLog(store, "job").read().driver == "three"
    with pytest.raises(FencedError, match="superseded"):
        late_ = JobLog(store, "job")
        late_.read()
        late_.begin_attempt("four", after=1)


# ------------------------------------------------------------------------------------------------------ large files


def test_a_large_file_is_written_in_parts_and_is_there_at_the_end(store: ObjectStore, proxy: Proxy) -> None:
    file = store.write("large")
    file.write(LARGE)
    assert store.names() == []
    store.close_durably(file)
    assert store.read("large") == LARGE
    assert store.read("large", 7, 2 * PART_BYTES) == LARGE[7 : 7 + 2 * PART_BYTES]
    assert [proxy.count(kind) for kind in ("begin", "complete", "put")] == [1, 1, 0]
    print([(len(r.body), r.query) for r in proxy.requests if r.kind == "part"])
    parts = {request.query["partNumber"][0]: len(request.body) for request in proxy.requests if request.kind == "part"}
    assert parts == {"1": PART_BYTES, "2": PART_BYTES, "3": 12_345}


@pytest.mark.parametrize(
    ("kind", "deed"), [("part", told(503, "SlowDown")), ("part", answer_lost), ("complete", answer_lost)]
)
def test_parts_are_written_again(store: ObjectStore, proxy: Proxy, kind: str, deed) -> None:
    proxy.add(kind, deed, times=1)
    write(store, "large", LARGE)
    assert store.read("large") == LARGE


def test_a_large_file_that_cannot_be_written_leaves_nothing(store: ObjectStore, proxy: Proxy) -> None:
    proxy.add("part", told(403, "QuotaExceeded", "The bucket has no room."), key="large")
    with pytest.raises(StorageError, match=r"cannot write s3://cutwater-tests/.*/large: 403 QuotaExceeded"):
        write(store, "large", LARGE)
    assert store.list() == []
    assert proxy.count("abort") == 1, "what the bucket has of it goes"


def test_a_large_file_that_nobody_ends_leaves_nothing(store: ObjectStore, proxy: Proxy) -> None:
    file = store.write("large")
    file.write(LARGE)
    file.close()
    assert store.list() == []
    assert proxy.count("begin") == proxy.count("abort")
    assert proxy.count("complete") == 0


# ------------------------------------------------------------------------------------------- what is said, and how


def test_a_bucket_that_is_full_is_told(store: ObjectStore, proxy: Proxy) -> None:
    proxy.add("put", told(507, "InsufficientStorage", "No space."))
    with pytest.raises(
        StorageError, match=r"cannot write s3://cutwater-tests/.*/x: 507 InsufficientStorage No space"
    ) as e:
        store.create("x", b"")
    assert "make room" in e.value.hint
    assert proxy.count("put") == 1, "no use to ask again"


def test_a_bucket_that_is_gone_is_told_and_no_missing_file(store: ObjectStore, proxy: Proxy) -> None:
    proxy.add("", told(404, "NoSuchBucket"))
    for call in (lambda: store.read("x"), lambda: store.names("x"), lambda: store.create("x", b""), store.exists):
        with pytest.raises(StorageError, match="bucket 'cutwater-tests' is not there") as error:
            call()
        assert not isinstance(error.value, CorruptSnapshotError)
    proxy.faults.clear()
    with pytest.raises(StorageError, match="bucket 'no-such-bucket' is not there"):
        open_store("s3://no-such-bucket/chk")


def test_wrong_credentials_are_told_without_them(bucket: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "guessed-and-wrong")
    with pytest.raises(StorageError, match="403 SignatureDoesNotMatch") as error:
        open_store(bucket)
    assert "right to get, put, delete and list" in str(error.value)
    assert "guessed" not in str(error.value)


def _credentials(path: Path, secret: str) -> None:
    path.write_text(f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {secret}\n")
    path.chmod(0o600)


def test_credentials_that_expire_are_read_again(
    bucket: str, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    with pytest.raises(ConfigError, match="credentials cannot be read: No such file"):
        open_store(bucket)
    _credentials(file, SECRET)
    store = ObjectStore(bucket, patience=QUICK)
    store.make()

    def expired(request, forward):
        _credentials(file, SECRET)
        return told(400, "ExpiredToken", "The provided token has expired.")(request, forward)

    _credentials(file, "of-yesterday")
    proxy.add("put", expired, times=1)
    assert store.create("x", b"one") is True
    proxy.add("", told(400, "ExpiredToken", "The provided token has expired."))
    with pytest.raises(StorageError, match="ExpiredToken The provided token has expired") as error:
        store.read("x")
    assert "have expired" in error.value.hint
    file.write_text(f"[default]\n{SECRET}\n")
    with pytest.raises(ConfigError, match="no profile 'default', or is no file of credentials") as wrong:
        open_store(bucket)
    assert SECRET not in repr(wrong.value.__dict__) + str(wrong.value)


def test_nothing_of_a_secret_is_in_a_uri_or_a_pickle(bucket: str) -> None:
    import pickle

    for uri in (f"s3://{KEY}:{SECRET}@bucket/chk", "s3:///chk", f"s3://bucket/chk?secret={SECRET}"):
        with pytest.raises(ConfigError, match="names a bucket and a prefix") as error:
            store_at(uri)
        assert SECRET not in str(error.value)
    store = open_store(bucket)
    store.names()
    assert SECRET.encode() not in pickle.dumps(store)
    assert SECRET not in repr(store) + repr(vars(store))


def test_plain_http_is_asked_for(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(StorageError, match=r"only https:// is allowed. Set AWS_ALLOW_HTTP=true"):
        open_store(bucket)


def test_a_server_that_is_not_there_is_told(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match=r"cannot write s3://cutwater-tests/.*/.folder") as error:
        ObjectStore(bucket, patience=QUICK).make()
    assert not isinstance(error.value, InDoubtError), "nothing was sent"
    assert "AWS_ENDPOINT_URL" in error.value.hint


def test_a_server_that_ignores_conditions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with ObjectServer("liar", "rclone") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"ignores If-None-Match.*two drivers could both own the job"):
                open_store("s3://liar/chk")
        assert store_at("s3://liar/chk").list() == []
