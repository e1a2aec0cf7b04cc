"""A job's model by name: what is near to a name that nobody serves, and two spellings of one model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from click.testing import CliRunner

from embedctl import enqueue_embeddings
from embedctl.cli import main, status, submit
from embedctl.queueing.broker import Broker
from embedctl.queueing.routing import missing_worker
from embedctl.store import ServedModel, WorkerRow
from embedctl.terminal.drawing import overview_lines
from embedctl.waiting.overview import Gatherer
from embedctl_config.errors import CorpusChanged
from embedctl_config.hardware import ModelEntry
from embedctl_config.settings import Settings
from embedctl_workers.backends.dummy import DummyBackend
from tests.support.rig import Rig
from tests.support.store import OTHER, row

SHORT, LONG = "all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"
TYPO = "all-MiniLM-L6-v3"
NEAR = (
    f"Did you mean {SHORT}? Live workers serve it. If {TYPO} is the right name, start one: "
    f"embedctl worker --class dummy --model {TYPO}"
)


def serving(own: str, *spellings: str, instance: str = "w") -> WorkerRow:
    """A worker that was started with one name, and serves the model under others too."""
    plain = row(instance, own, *spellings)
    return dataclasses.replace(
        plain,
        models={
            name: dataclasses.replace(served, spelling_of="" if name == own else own)
            for name, served in plain.models.items()
        },
    )


def test_whoever_tells_of_a_job_names_the_near_model_that_live_workers_serve(
    settings: Settings,
    broker: Broker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker.workers.beat(serving(SHORT, LONG))
    enqueue_embeddings(["a"], model=TYPO, hardware="auto", settings=settings)
    assert f"Did you mean {SHORT}? Live workers serve it. If {TYPO} is the right name, start one: " in caplog.text
    job = enqueue_embeddings(["a"], model=TYPO, settings=settings)
    assert missing_worker(job.status()) == f"No live worker serves {TYPO} on dummy. {NEAR}"
    assert NEAR in "\n".join(line.plain for line in overview_lines(Gatherer(broker).look(), None))
    other = enqueue_embeddings(["a"], model="clip", settings=settings)
    assert missing_worker(other.status()).endswith("on dummy. Start one: embedctl worker --class dummy --model clip")
    monkeypatch.setattr(submit, "load_settings", lambda: settings)
    monkeypatch.setattr(status, "load_settings", lambda: settings)
    (tmp_path / "corpus.txt").write_text("a\n")
    done = CliRunner().invoke(main, ["submit", str(tmp_path / "corpus.txt"), "--model", TYPO])
    assert f"No live worker serves {TYPO} on dummy. {NEAR}" in done.stderr
    assert f"workers    0 live. {NEAR}" in CliRunner().invoke(main, ["status", done.stdout.strip()]).stdout


def test_a_model_with_two_spellings_is_shown_once(broker: Broker) -> None:
    broker.workers.beat(serving(SHORT, LONG))
    overview = Gatherer(broker).look()
    assert [queue.model for queue in overview.queues] == [SHORT]
    assert LONG not in "\n".join(line.plain for line in overview_lines(overview, None))


@pytest.mark.in_redis
def test_a_job_under_either_spelling_goes_to_the_live_worker(settings: Settings, broker: Broker) -> None:
    broker.workers.beat(serving(LONG, SHORT))
    for name in (SHORT, LONG):
        found = enqueue_embeddings(["a"], model=name, settings=settings).status()
        assert (found.live_workers, found.queue in serving(LONG, SHORT).queues) == (1, True)


@pytest.mark.parametrize(("first", "second"), [(SHORT, LONG), (LONG, SHORT)])
def test_the_same_key_under_the_other_spelling_is_the_same_job(settings: Settings, first: str, second: str) -> None:
    job = enqueue_embeddings(["a"], model=first, idempotency_key="k", settings=settings)
    again = enqueue_embeddings(["a"], model=second, idempotency_key="k", settings=settings)
    assert (again.id, again.status().model) == (job.id, first)


def test_names_that_a_live_worker_or_the_settings_keep_apart_are_two_models(settings: Settings, broker: Broker) -> None:
    enqueue_embeddings(["a"], model=SHORT, idempotency_key="k", settings=settings)
    apart = settings.replace(models={LONG: ModelEntry("/elsewhere")})
    with pytest.raises(CorpusChanged, match="model was"):
        enqueue_embeddings(["a"], model=LONG, idempotency_key="k", settings=apart)
    both = row("w1", SHORT, LONG)
    broker.workers.beat(dataclasses.replace(both, models={**both.models, LONG: ServedModel(OTHER, 3, 1.0)}))
    with pytest.raises(CorpusChanged, match="model was"):
        enqueue_embeddings(["a"], model=LONG, idempotency_key="k", settings=settings)
    broker.workers.leave(both)
    broker.workers.beat(serving(SHORT, LONG))
    broker.workers.beat(row("w2", SHORT))
    with pytest.raises(CorpusChanged, match="model was"):
        enqueue_embeddings(["a"], model=LONG, idempotency_key="k", settings=settings)


@pytest.mark.parametrize(("theirs", "takes"), [(OTHER, False), (None, True)])
def test_a_job_is_left_to_who_has_its_name(settings: Settings, broker: Broker, theirs: str | None, takes: bool) -> None:
    """A worker that serves the name as another spelling does not pin the job to its own files."""
    rig = Rig(broker, settings, DummyBackend(dim=16))
    broker.workers.beat(serving("dummy", LONG, instance="me"))
    job = enqueue_embeddings(["a"], model=LONG, settings=settings)
    if theirs is not None:
        named = row("w2", LONG)
        broker.workers.beat(dataclasses.replace(named, models={LONG: ServedModel(theirs, 16, 1.0)}))
    rig.runner.run("dummy", job.status().queue)
    assert (job.status().done, job.status().claims) == ((1, 1) if takes else (0, 0))


def test_a_job_that_is_pinned_to_our_files_stays_ours(settings: Settings, broker: Broker) -> None:
    rig = Rig(broker, settings, DummyBackend(dim=16))
    job = enqueue_embeddings(["a", "b"], model=LONG, chunk_size=1, settings=settings)
    rig.runner.run("dummy", job.status().queue)
    named = row("w2", LONG)
    broker.workers.beat(dataclasses.replace(named, models={LONG: ServedModel(OTHER, 16, 1.0)}))
    after_a_restart = Rig(broker, settings, DummyBackend(dim=16))
    after_a_restart.runner.run("dummy", job.status().queue)
    assert job.status().done == 2
