"""A real `embedctl metrics` while Redis is away."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.support.monitor import running_monitor
from tests.support.redis_server import RedisServer
from tests.support.waiting import eventually


def test_while_redis_is_away_it_is_well_and_not_ready_and_tells_no_old_figures(
    own_redis: RedisServer, environment: dict[str, str], short_folder: Path
) -> None:
    environment["EMBEDCTL_REDIS_URL"] = own_redis.url
    own_redis.stop()
    with running_monitor(environment, short_folder) as monitor:
        eventually(lambda: monitor.get("/readyz")[0] == 503)
        assert monitor.get("/healthz")[0] == 200
        found = {name[0]: value for name, value in monitor.metrics().items()}
        assert found == {"build_info": 1, "redis_up": 0}
        own_redis.start()
        eventually(lambda: monitor.ready)
        assert monitor.metrics()["redis_up",] == 1
        assert monitor.stop(signal.SIGINT) == 130
