"""What a tenant keeps has a bound: files, batches and bytes, however they go."""

from __future__ import annotations

import pytest
from redis import Redis

from embedctl.queueing.broker import Broker
from embedctl.store.batches import BatchStore, Step
from embedctl.store.stored_files import FileStore, KeepsEnough, Once, StoredFile
from embedctl_config import keys

KEPT = keys.ledger("kept")


@pytest.fixture(autouse=True)
def bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "KEPT_MOST", 3)
    monkeypatch.setattr(keys, "KEPT_BYTES", 16 * keys.SMALL_FILE_BYTES)


class Keeping:
    def __init__(self, broker: Broker, raw: Redis) -> None:
        self.files = FileStore(broker.connection, broker.chunk_files)
        self.raw = raw

    def written(self, size: int, tenant: str = "a") -> StoredFile:
        writer = self.files.writer()
        writer.add(bytes(size))
        return writer.finish(tenant=tenant, name="f", purpose="batch", ttl_s=100)

    def keep(self, size: int = 1, tenant: str = "a") -> StoredFile:
        file = self.written(size, tenant)
        self.files.make(file, Once(file.id, "digest", again=False))
        return file

    def look_anew(self) -> None:
        """As if all had been counted some time ago."""
        self.raw.delete(*self.raw.keys(keys.ledger("counted:*")), "none")


@pytest.fixture
def keeping(broker: Broker, raw: Redis) -> Keeping:
    return Keeping(broker, raw)


def test_one_file_more_than_a_tenant_may_keep_is_refused(keeping: Keeping, raw: Redis) -> None:
    kept = [keeping.keep() for _ in range(3)]
    with pytest.raises(KeepsEnough):
        keeping.keep()
    keeping.keep(tenant="b")
    keeping.files.remove(kept[0])
    keeping.keep()
    raw.delete(keys.file(kept[1].id))  # it has expired
    with pytest.raises(KeepsEnough):
        keeping.keep()
    keeping.look_anew()
    keeping.keep()
    assert raw.hget(KEPT, keys.files("a")) == b"3"
    assert all(raw.pttl(name) > 0 for name in raw.keys("embed:*"))


def test_the_last_bytes_are_for_small_files(keeping: Keeping, raw: Redis) -> None:
    mib = keys.SMALL_FILE_BYTES
    large = keeping.keep(14 * mib)
    with pytest.raises(KeepsEnough):
        keeping.keep(mib + 1)
    keeping.keep(mib)
    raw.delete(keys.file(large.id))
    keeping.look_anew()
    keeping.keep(12 * mib)
    assert int(raw.hget(KEPT, keys.files("a")) or 0) == 13 * mib
    keeping.look_anew()
    raw.delete(KEPT)
    keeping.keep(mib)
    assert int(raw.hget(KEPT, keys.files("a")) or 0) == 14 * mib


def test_answers_to_a_batch_find_room_and_are_counted(keeping: Keeping, broker: Broker, raw: Redis) -> None:
    batches = BatchStore(broker.connection)
    for number in range(3):
        batches.make(f"batch_{number}", {"tenant": "a"}, Once(str(number), "digest", again=False))
        keeping.keep()
    with pytest.raises(KeepsEnough):
        batches.make("batch_3", {"tenant": "a"}, Once("3", "digest", again=False))
    batch = batches.take("token", 30.0)
    assert batch is not None
    answers = keeping.written(10)
    assert batches.note(batch, "token", Step({"status": "completed"}, after="end", files=[answers])) == "completed"
    assert keeping.files.get(answers.id, "a") == answers
    assert raw.hget(KEPT, keys.files("a")) == b"13"
