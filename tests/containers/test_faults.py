"""What goes wrong with containers, done to a stack within a job; then each record is counted.

`make containers` runs the quick ones, `make containers ALL=1` all of them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.containers.boxes import Boxes, docker
from tests.containers.counting import counted
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
long = pytest.mark.long_fault

#: A worker that says nothing for longer loses what it holds: settings.lease_s.
LEASE_S = 15.0
#: From docker-compose.yml.
GRACE_S = 120.0
#: Sends a signal to the workers of a container, but not to what watches over them.
SIGNAL = """
import os, pathlib, sys
for each in pathlib.Path("/proc").glob("[0-9]*"):
    if b"embedctl_workers\\0--class" in (each / "cmdline").read_bytes():
        os.kill(int(each.name), int(sys.argv[1]))
"""


def kill(boxes: Boxes, service: str) -> None:
    """kill -9 of a container's first process, as the kernel does it; the engine starts the container again."""
    container = boxes.id(service)
    try:
        os.kill(boxes.state(container)["Pid"], signal.SIGKILL)
    except (PermissionError, ProcessLookupError):
        pytest.skip("the engine's processes are not ours to kill")
    eventually(lambda: boxes.restarts(container) and boxes.state(container)["Running"], what="a restart")


def kill_worker(boxes: Boxes) -> None:
    kill(boxes, "cpu")


def kill_process(boxes: Boxes) -> None:
    boxes.inside("cpu", SIGNAL, str(int(signal.SIGKILL)))


def kill_redis(boxes: Boxes) -> None:
    kill(boxes, "redis")


def restart_redis(boxes: Boxes) -> None:
    boxes.compose("restart", "redis")


def restart_worker(boxes: Boxes) -> None:
    boxes.compose("restart", "cpu")


def down_and_up(boxes: Boxes) -> None:
    boxes.compose("down")
    boxes.compose("up", "--detach", "redis", "cpu")


def make_again(boxes: Boxes) -> None:
    boxes.compose("up", "--detach", "--force-recreate", "redis", "cpu")


def pause_worker(boxes: Boxes) -> None:
    pause(boxes, "cpu")


def pause_redis(boxes: Boxes) -> None:
    pause(boxes, "redis")


def pause(boxes: Boxes, service: str) -> None:
    boxes.compose("pause", service)
    time.sleep(2 * LEASE_S)  # longer than a lease
    boxes.compose("unpause", service)


def cut_worker(boxes: Boxes) -> None:
    cut(boxes, "cpu")


def cut_redis(boxes: Boxes) -> None:
    cut(boxes, "redis")


def cut(boxes: Boxes, service: str) -> None:
    network, container = f"{boxes.project}_workers", boxes.id(service)
    docker("network", "disconnect", network, container)
    time.sleep(60)  # a minute without a network
    docker("network", "connect", "--alias", service, network, container)


QUICK: dict[str, Callable[[Boxes], None]] = {
    "`kill -9` of the worker's container": kill_worker,
    "`kill -9` of Redis": kill_redis,
    "`docker compose down`, then `up`": down_and_up,
}
LONG: dict[str, Callable[[Boxes], None]] = {
    "`kill -9` of the worker, within its container": kill_process,
    "`docker compose restart cpu`": restart_worker,
    "`docker compose restart redis`": restart_redis,
    "`docker compose up --force-recreate`, as in an upgrade": make_again,
    "the worker paused for 30 s, twice its lease": pause_worker,
    "Redis paused for 30 s": pause_redis,
    "the worker's network cut for a minute": cut_worker,
    "Redis' network cut for a minute": cut_redis,
}


@pytest.mark.parametrize("fault", [*QUICK, *(pytest.param(name, marks=long) for name in LONG)])
def test_a_fault_within_a_job_loses_and_doubles_nothing(slow: Boxes, fault: str) -> None:
    with counted(slow, fault) as job:
        job.waits_for(2)
        {**QUICK, **LONG}[fault](slow)


@long
def test_sigterm_ends_a_worker_within_its_time_and_hands_back_what_it_had(slow: Boxes) -> None:
    with counted(slow, "`docker compose stop cpu`, then `start`") as job:
        job.waits_for(2)
        stop_in_time(slow)
        slow.compose("start", "cpu")
    assert job.job.status().lapsed == 0, "the chunk in hand was finished or handed back"


@long
def test_sigterm_ends_a_worker_within_its_time_while_redis_is_away(slow: Boxes) -> None:
    """As when both are recreated. Redis' name does not resolve meanwhile, and each attempt takes seconds."""
    with counted(slow, "`docker compose stop redis`, then `stop cpu`, then `start`") as job:
        job.waits_for(2)
        slow.compose("stop", "redis")
        stop_in_time(slow)
        slow.compose("start", "redis", "cpu")


def stop_in_time(boxes: Boxes) -> None:
    begun = time.monotonic()
    boxes.compose("stop", "cpu")
    assert time.monotonic() - begun < GRACE_S
    assert boxes.state(boxes.id("cpu"))["ExitCode"] == 0


@long
def test_two_workers_of_which_one_dies(slow: Boxes) -> None:
    slow.compose("up", "--detach", "--scale", "cpu=2", "redis", "cpu")
    slow.wait_ready(2)
    with counted(slow, "one of two workers is killed") as job:
        job.waits_for(2)
        docker("kill", slow.ids("cpu")[-1])
    slow.compose("up", "--detach", "--scale", "cpu=1", "redis", "cpu")
    slow.wait_ready(1)


@long
def test_a_text_that_eats_the_memory_fails_by_name(slow: Boxes) -> None:
    """The kernel kills a worker for the limit. The one in quarantine asks for no more than is left."""
    limited = {"cpu": {"mem_limit": "512m", "memswap_limit": "512m"}}
    said = "killed by SIGKILL (out of memory)"
    fault = "a text that takes more memory than the limit"
    with slow.changed(limited), counted(slow, fault, {77: "eat-memory"}, {77: "out_of_memory"}) as job:
        eventually(lambda: said in slow.outside("status"), what=said, show=lambda: slow.log("cpu"))
    assert "failed     1 (out_of_memory 1)" in slow.outside("status", job.job.id)


@long
def test_redis_with_a_full_volume_pauses_what_it_can_t_keep(slow: Boxes) -> None:
    """Its append-only file is on a file system of its own, which something else fills."""
    small = {"driver_opts": {"type": "tmpfs", "device": "tmpfs", "o": "size=16m,uid=999,gid=999"}}
    with (
        slow.changed({"redis": {"volumes": ["full:/data"]}}, volumes={"full": small}),
        counted(slow, "Redis' volume is full for 20 s") as job,
    ):
        job.waits_for(2)
        slow.compose("exec", "--no-TTY", "redis", "sh", "-c", "dd if=/dev/zero of=/data/other bs=1M; true", check=False)
        time.sleep(20)  # so long it stays full
        slow.compose("exec", "--no-TTY", "redis", "rm", "/data/other")


@long
def test_the_clock_of_a_worker_may_be_wrong(slow: Boxes) -> None:
    """Containers have the clock of their host, so the worker's Python gets another one."""
    place = slow.folder / "clock"
    place.mkdir()
    shift = "import time\nreal, real_ns = time.time, time.time_ns\n"
    shift += "time.time = lambda: real() - 3600\ntime.time_ns = lambda: real_ns() - 3600 * 10**9\n"
    (place / "sitecustomize.py").write_text(shift)
    place.chmod(0o755)
    late = {"cpu": {"environment": {"PYTHONPATH": "/clock"}, "volumes": [f"{place}:/clock:ro"]}}
    with slow.changed(late), counted(slow, "the worker's clock is an hour late, and it is killed") as job:
        assert float(slow.inside("cpu", "import time; print(time.time())")) < time.time() - 3000
        job.waits_for(2)
        kill(slow, "cpu")


@long
def test_a_hung_worker_becomes_unhealthy_and_a_loading_one_does_not(slow: Boxes) -> None:
    """The checks are 30 s apart, and three must fail; each may take 20 s."""
    slow.wait_healthy("cpu")
    begun = time.monotonic()
    # Its worker is stopped, so it does nothing, and nobody sees an end of it.
    slow.inside("cpu", SIGNAL, str(int(signal.SIGSTOP)))
    container = slow.id("cpu")
    eventually(lambda: slow.state(container)["Health"]["Status"] == "unhealthy", 300, what="unhealthy")
    assert time.monotonic() - begun < 240
    config = slow.folder / "config" / "containers.toml"
    config.write_text(config.read_text().replace("dim = 16,", "dim = 16, seconds_to_load = 200.0,"))
    slow.compose("up", "--detach", "--force-recreate", "cpu")
    loading = slow.id("cpu")
    seen = set[str]()

    def healthy() -> bool:
        seen.add(slow.state(loading)["Health"]["Status"])
        return "healthy" in seen

    eventually(healthy, 600, what="healthy")
    assert seen == {"starting", "healthy"}
