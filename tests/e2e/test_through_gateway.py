"""Commands and the library through a gateway, for those who have no Redis."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from embedctl import Job, enqueue_embeddings
from embedctl_config.settings import Settings
from embedctl_gateway.access.key_file import add_key
from tests.support.gateway import Running, running_gateway
from tests.support.here import Here
from tests.support.jobs import reference
from tests.support.processes import changed

TEXTS = [f"text {number}" for number in range(700)]


class Outside(NamedTuple):
    """A gateway with keys, and what a caller without Redis has."""

    gateway: Running
    keys: Path
    settings: Settings
    #: The variables of the caller's processes.
    variables: dict[str, str]


@pytest.fixture
def outside(here: Here, tmp_path: Path) -> Iterator[Outside]:
    keys, key_file = tmp_path / "gateway.keys", tmp_path / "key"
    key_file.write_text(add_key(keys, "alice", "search") + "\n")
    with running_gateway(here.settings.replace(gateway_keys_file=str(keys))) as gateway:
        settings = here.settings.replace(redis_url="", url=gateway.url, api_key_file=str(key_file), chunk_files="")
        variables = {"EMBEDCTL_URL": gateway.url, "EMBEDCTL_API_KEY_FILE": str(key_file), "EMBEDCTL_CHUNK_FILES": ""}
        yield Outside(gateway, keys, settings, {**variables, "EMBEDCTL_REDIS_URL": ""})


def test_the_library_gets_the_same_vectors_through_a_gateway(here: Here, outside: Outside) -> None:
    here.start_worker()
    job = enqueue_embeddings(TEXTS, ids=range(len(TEXTS)), chunk_size=64, settings=outside.settings)
    assert here.broker.jobs.status(job.id).tenant == "search"
    seen = list(job.iter_results(timeout=60))
    assert job.wait(timeout=60).done == len(TEXTS)
    assert [label for chunk in seen for label in chunk.ids] == [str(number) for number in range(len(TEXTS))]
    np.testing.assert_allclose(job.vectors(), reference(TEXTS), atol=1e-6)
    assert Job.get(job.id, outside.settings).errors() == []
    job.discard()
    assert not list(here.broker.jobs.newest())


def test_the_commands_write_the_same_bytes_through_a_gateway(here: Here, outside: Outside) -> None:
    here.start_worker()
    (here.folder / "corpus.txt").write_text("\n".join(TEXTS))
    for name, variables in (("redis", {}), ("gateway", outside.variables)):
        with changed(here.environment, variables):
            submitted = here.embedctl("submit", "corpus.txt", "--chunk-size", "64")
            assert submitted.returncode == 0, submitted.stderr
            job_id = submitted.stdout.strip()
            fetched = here.embedctl("fetch", job_id, "-o", f"{name}.npy", "--quiet")
            assert fetched.returncode == 0, fetched.stderr
            shown = here.embedctl("status", job_id, "--json")
            assert json.loads(shown.stdout)["done"] == len(TEXTS), shown.stderr
            for command in ("wait", "errors", "cancel", "discard"):
                done = here.embedctl(command, job_id)
                assert done.returncode == 0, done.stderr
    assert (here.folder / "redis.npy").read_bytes() == (here.folder / "gateway.npy").read_bytes()
    assert not list(here.broker.jobs.newest())
