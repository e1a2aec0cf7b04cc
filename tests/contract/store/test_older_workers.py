"""Live workers that are older than a job: they leave it alone, so whoever waits for it is told."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
from click.testing import CliRunner

from embedctl import Job, WaitTimeout, enqueue_embeddings
from embedctl.broker import Broker
from embedctl.cli import listing, main, status, submit
from embedctl.enqueue import job_spec
from embedctl.job_options import SubmitOptions
from embedctl.local import borrowed_worker
from embedctl.overview import Gatherer
from embedctl.routing import missing_worker
from embedctl.store import ServedModel
from embedctl_config import wire
from embedctl_config.settings import Settings
from tests.support.store import DIM, MINE, row

TOLD = (
    "No live worker takes jobs of version 4: those that serve dummy on half (2) are older. Upgrade them, or start one: "
    "embedctl worker --class half --model dummy"
)


_OWN_TTL_S = count(1000)


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Settings of one test alone, and so its own broker: a broker knows for a second who was alive."""
    return settings.replace(ttl_s=float(next(_OWN_TTL_S)))


@pytest.fixture
def older(broker: Broker) -> None:
    """Two live workers of the release before."""
    for name in ("one", "two"):
        broker.workers.beat(row(name, hardware="half", precision="fp16", version=3))


def newest(broker: Broker) -> None:
    broker.workers.beat(row("new", hardware="half", precision="fp16", version=wire.VERSION))


@pytest.mark.in_redis
@pytest.mark.usefixtures("older")
def test_a_job_that_only_older_workers_could_take_says_so(settings: Settings, broker: Broker) -> None:
    job = enqueue_embeddings(["a"], hardware="half", settings=settings)
    found = job.status()
    assert (found.live_workers, found.older_workers, missing_worker(found)) == (0, 2, TOLD)
    newest(broker)
    found = Job(job.id, Broker.connect(settings)).status()  # another process; this one's knowledge is a second old
    assert (found.live_workers, found.older_workers, missing_worker(found)) == (1, 2, "")


@pytest.mark.in_redis
@pytest.mark.usefixtures("older")
def test_who_waits_for_it_hears_of_it(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    job = enqueue_embeddings(["a"], hardware="half", settings=settings)
    with pytest.raises(WaitTimeout, match="Upgrade them, or start one"):
        job.wait(0.3)
    assert [each.message for each in caplog.records if each.levelno == logging.WARNING] == [TOLD]


@pytest.mark.in_redis
def test_workers_of_any_version_take_a_job_of_the_first(settings: Settings, broker: Broker) -> None:
    broker.workers.beat(row("one", version=1))
    found = enqueue_embeddings(["a"], settings=settings).status()
    assert (found.version, found.live_workers, found.older_workers) == (1, 1, 0)


@pytest.mark.in_redis
@pytest.mark.usefixtures("older")
def test_the_commands_say_so(
    settings: Settings, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (submit, listing, status):
        monkeypatch.setattr(module, "load_settings", lambda: settings)
    (tmp_path / "corpus.txt").write_text("a\n")
    done = CliRunner().invoke(main, ["submit", str(tmp_path / "corpus.txt"), "--class", "half"])
    assert TOLD in done.stderr
    listed = json.loads(CliRunner().invoke(main, ["list", "--json"]).stdout)
    assert [(job["live_workers"], job["older_workers"]) for job in listed] == [(0, 2)]
    (pace,) = Gatherer(broker).look().active
    assert (pace.job.live_workers, pace.job.older_workers) == (0, 2)


@pytest.mark.parametrize("version", [1, 4])
@pytest.mark.usefixtures("older")
def test_a_command_with_its_own_worker_says_why_it_starts_one(version: int, settings: Settings) -> None:
    said: list[str] = []

    @contextmanager
    def start() -> Iterator[Callable[[], None]]:
        said.append("started")
        yield lambda: None

    with borrowed_worker(settings, hardware="half", model="dummy", version=version, start=start, say=said.append):
        pass
    names = "one@host, two@host"
    older = "The live workers that serve dummy on half are older than version 4, the job's: upgrade"
    assert said == (
        [f"Encoded by live workers of this Redis: {names}"]
        if version == 1
        else [f"{older} {names}. This command starts a worker", "started"]
    )


@pytest.mark.parametrize("versions", [{"half": 3, "slim": wire.VERSION}, {"half": 3, "slim": 3}], ids=str)
def test_auto_prefers_a_class_whose_workers_take_the_job(
    versions: dict[str, int], settings: Settings, broker: Broker
) -> None:
    both = settings.replace(classes={**settings.classes, "slim": settings.classes["half"]})
    for hardware, rate in (("half", 200.0), ("slim", 100.0)):
        served = {"dummy": ServedModel(MINE, DIM, rate)}
        known = versions[hardware]
        broker.workers.beat(row(hardware, hardware=hardware, precision="fp16", version=known, models=served))
    producer = Broker.connect(both)
    spec = job_spec(producer, SubmitOptions(hardware="auto", precision="fp16"))
    producer.close()
    assert spec.hardware == ("half" if versions["slim"] == 3 else "slim")
