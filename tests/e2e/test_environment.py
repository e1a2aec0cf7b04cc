"""Environment variables meant for another program that uses Celery have no effect on embedctl."""

from __future__ import annotations

import subprocess
import sys

import redis as redis_py

from embedctl_config import keys
from tests.support.here import Here
from tests.support.redis_server import RedisServer, as_user

QUEUE = keys.queue("dummy", "dummy")
SUBMIT = """
import os
before = dict(os.environ)
from embedctl import enqueue_embeddings
job = enqueue_embeddings(["one", "two", "three"], chunk_size=1)
job.wait(timeout=60)
assert dict(os.environ) == before
print(job.status().state)
"""


#: What Celery and kombu read themselves, all meant for another program.
OTHERS = {
    "CELERY_RESULT_BACKEND": "no_such_backend://",
    "CELERY_LOADER": "no.such.module:Loader",
    "CELERY_CONFIG_MODULE": "no_such_configuration",
    "CELERY_CUSTOM_WORKER_POOL": "no.such.module:Pool",
    "CELERY_LOG_LEVEL": "10",
    "CELERY_TRACE_APP": "1",
    "C_FORCE_ROOT": "1",
    "C_STRICT_APP": "1",
    "C_WNOCONF": "1",
    "DJANGO_SETTINGS_MODULE": "no_such_site.settings",
    "FORKED_BY_MULTIPROCESSING": "1",
    "KOMBU_DISABLE_LIMIT_PROTECTION": "1",
}
URLS = ("CELERY_BROKER_URL", "CELERY_BROKER_READ_URL", "CELERY_BROKER_WRITE_URL")


def test_tickets_go_to_the_configured_redis_alone_and_a_program_keeps_its_environment(
    here: Here, own_redis: RedisServer
) -> None:
    elsewhere = f"redis+socket://{own_redis.folder}/redis.sock?virtual_host=0"
    here.environment.update({**OTHERS, **dict.fromkeys(URLS, elsewhere)})
    here.raw.config_resetstat()
    worker = here.start_worker()
    done = subprocess.run(
        [sys.executable, "-c", SUBMIT],
        env=as_user(here.environment, "producer"),
        cwd=here.folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.returncode) == ("completed\n", 0), done.stderr + worker.log()
    commands = here.raw.info("commandstats")
    assert commands["cmdstat_lpush"]["calls"] >= 1
    assert commands["cmdstat_brpop"]["calls"] >= 1
    assert worker.process.poll() is None
    assert "django" not in (done.stderr + worker.log()).lower()
    with redis_py.Redis.from_url(own_redis.url) as other:
        assert not other.dbsize()
        assert len(other.client_list()) == 1
