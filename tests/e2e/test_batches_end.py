"""Every batch ends in one of OpenAI's states, whatever happens between two of its steps."""

from __future__ import annotations

import errno
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NoReturn

import openai
import pytest
import redis

from embedctl.store.stored_files import FileStore
from embedctl_config import keys
from embedctl_config.errors import BrokerUnavailable
from embedctl_config.settings import Settings
from tests.support.batches import ENDED, client_of, counts, create, ended, lines_of, upload
from tests.support.gateway import Running, running_gateway
from tests.support.here import Here
from tests.support.waiting import eventually

#: Where something happens: before a step of a batch, by the state that it is in.
MOMENTS = {
    "checking": ("_Work", "_validate"),
    "submitting": ("_Work", "_submit"),
    "submitted": ("_Work", "_begin"),
    "running": ("_Work", "_look"),
    "ending": ("_Held", "end"),
    "winding up": ("_Work", "_wind_up"),
}


#: Let a deadline be over, in a full Redis too.
_PASS = "redis.call('ZREM', KEYS[1], ''); redis.call('ZADD', KEYS[1], 'XX', 0, ARGV[1])"


@dataclass
class Scene:
    """A batch whose runner stands before a step."""

    client: openai.OpenAI
    raw: redis.Redis
    patched: pytest.MonkeyPatch
    file_id: str = ""
    batch_id: str = ""
    made: dict[Any, Any] = field(default_factory=dict)
    is_set: threading.Event = field(default_factory=threading.Event)

    @property
    def name(self) -> str:
        return keys.batch(self.batch_id)

    def job(self) -> str:
        return self.fact("job")

    def fact(self, name: str) -> str:
        found: Any = self.raw.hget(self.name, name) or b""
        return str(found.decode())

    def wake(self) -> None:
        """Let somebody look at it, as if the pause or the lease were over."""
        self.raw.zadd(keys.unfinished("default"), {self.batch_id: 0}, xx=True)

    def pass_deadlines(self) -> None:
        """Let time pass until its end."""

        def is_over() -> bool:
            self.raw.eval(_PASS, 1, keys.DEADLINES, self.batch_id)
            return self.fact("status") in ENDED

        eventually(is_over, what="the end that needs no runner")


def input_deleted(scene: Scene) -> None:
    scene.client.files.delete(scene.file_id)


def cancelled(scene: Scene) -> None:
    with suppress(openai.BadRequestError):
        scene.client.batches.cancel(scene.batch_id)


def job_lost(scene: Scene) -> None:
    scene.raw.unlink(*scene.raw.keys(f"{keys.job(scene.job())}*"), *scene.raw.keys("embed:idempotency:*"), "none")


def results_lost(scene: Scene) -> None:
    scene.raw.unlink(*scene.raw.keys(f"{keys.job(scene.job())}:out:*"), "none")


def last_second_lost(scene: Scene) -> None:
    """Redis has the batch as it was made, and no runner of it."""
    with scene.raw.pipeline() as pipe:  # at once: nobody may see that there is no batch
        pipe.unlink(scene.name)
        pipe.hset(scene.name, mapping=scene.made)
        pipe.pexpire(scene.name, 1000 * keys.FILE_TTL_S)
        pipe.execute()
    scene.wake()


def taken_by_another(scene: Scene) -> None:
    """A second gateway, which is gone since, has taken it."""
    scene.raw.hset(scene.name, "runner", "another")
    scene.wake()


def clock_ahead(scene: Scene) -> None:
    now = time.time
    scene.patched.setattr(time, "time", lambda: now() + 25 * 3600)


def fails_for_ever(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device")


def away_for_ever(*_: object, **__: object) -> NoReturn:
    raise BrokerUnavailable("the place of the files is away")


def folder_full(scene: Scene) -> None:
    scene.patched.setattr(tempfile, "TemporaryFile", fails_for_ever)
    raise OSError(errno.ENOSPC, "No space left on device")


def files_away(scene: Scene) -> None:
    scene.patched.setattr(FileStore, "writer", away_for_ever)
    scene.patched.setattr(FileStore, "part", away_for_ever)
    raise BrokerUnavailable("the place of the files is away")


def lists_lost_and_files_away(scene: Scene) -> None:
    scene.raw.unlink(keys.DEADLINES, keys.CLOCK)
    files_away(scene)


def redis_full(scene: Scene) -> None:
    scene.raw.config_set("maxmemory", 1)


def damaged(scene: Scene) -> None:
    scene.raw.hset(scene.name, mapping={"total": "x", "job": "x", "status": "damaged"})


Event = Callable[[Scene], None]
#: Before which step, what happens → the states in which the batch may end, and the code of the reason, if there is one.
ROWS: list[tuple[str, Event, tuple[str, ...], str | None]] = [
    ("checking", input_deleted, ("completed",), None),  # it has been copied
    ("checking", cancelled, ("cancelled",), None),
    ("checking", folder_full, ("expired",), "ended_late"),
    ("checking", damaged, ("failed",), "ended_late"),
    ("submitting", cancelled, ("cancelled",), None),
    ("submitting", taken_by_another, ("completed",), None),
    ("submitting", redis_full, ("expired",), "ended_late"),
    ("submitted", last_second_lost, ("completed",), None),
    ("submitted", clock_ahead, ("completed",), None),
    ("running", input_deleted, ("completed",), None),
    ("running", job_lost, ("completed",), None),
    ("running", damaged, ("failed",), "ended_late"),
    ("ending", results_lost, ("completed",), None),
    ("ending", cancelled, ("completed", "cancelled"), None),
    ("ending", last_second_lost, ("completed",), None),
    ("ending", files_away, ("expired",), "ended_late"),
    ("ending", lists_lost_and_files_away, ("expired",), "ended_late"),
    ("winding up", job_lost, ("cancelled",), None),
    ("winding up", input_deleted, ("cancelled",), "invalid_input_file"),
    ("winding up", redis_full, ("cancelled",), "ended_late"),
]


@pytest.fixture
def gateway(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    for name in ("_PAUSE_S", "_NO_ROOM_S", "_LOOK_S", "_CHECK_S"):
        monkeypatch.setattr(f"embedctl_gateway.batches.runner.{name}", 0.1)
    with running_gateway(settings, hardware="dummy") as running:
        yield running


@pytest.mark.parametrize(
    ("moment", "event", "states", "code"), ROWS, ids=[f"{moment}: {event.__name__}" for moment, event, *_ in ROWS]
)
def test_a_batch_ends(
    here: Here,
    gateway: Running,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    event: Event,
    states: tuple[str, ...],
    code: str | None,
) -> None:
    if moment != "winding up":  # otherwise all of it has run before
        here.start_worker()
    with client_of(gateway) as client, monkeypatch.context() as patched:
        scene = Scene(client, here.raw, patched)
        happened = before(scene, moment, event)
        url = "/pooling" if moment == "winding up" else "/v1/embeddings"
        scene.file_id = upload(client, lines_of(["one", "two", "three"], url))
        scene.batch_id = create(client, scene.file_id, url).id
        scene.made = here.raw.hgetall(scene.name)
        scene.made.pop(b"runner", None)
        scene.is_set.set()
        if moment == "winding up":
            eventually(lambda: client.batches.retrieve(scene.batch_id).status == "in_progress", what="its job")
            client.batches.cancel(scene.batch_id)
        eventually(lambda: happened, what="the step")
        try:
            if code == "ended_late":
                scene.pass_deadlines()
            batch = ended(client, scene.batch_id)
        finally:
            here.raw.config_set("maxmemory", 0)
        assert batch.status in states
        assert [each.code for each in (batch.errors.data if batch.errors else None) or []] == [code] * bool(code)
        if batch.status == "completed":
            assert counts(batch) == (3, 3, 0)
            assert client.files.content(batch.output_file_id or "").content.count(b"\n") == 3
        assert here.raw.exists(keys.unfinished("default"), keys.DEADLINES) == 0


def before(scene: Scene, moment: str, event: Event) -> list[str]:
    """Let something happen before a step is made for the first time; gives what has happened."""
    owner, name = MOMENTS[moment]
    step = getattr(getattr(import_module("embedctl_gateway.batches.runner"), owner), name)
    happened: list[str] = []

    def stepped(*args: Any, **options: Any) -> Any:
        assert scene.is_set.wait(60)
        if not happened:
            happened.append(moment)
            event(scene)
        return step(*args, **options)

    scene.patched.setattr(f"embedctl_gateway.batches.runner.{owner}.{name}", stepped)
    return happened
