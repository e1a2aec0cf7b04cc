"""Runs the dashboard: reads its users, configures Flower, listens, stops cleanly."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embedctl.operating.dashboard.application import Dashboard
from embedctl.operating.local import state_folder
from embedctl.operating.monitoring.endpoint import listen_at
from embedctl.queueing.broker import Broker
from embedctl.store.connection import without_password
from embedctl_config.address import address_of, is_loopback
from embedctl_config.durable import locked
from embedctl_config.errors import MissingExtra, SettingsError, WorkerError
from embedctl_config.settings import Settings, expanded


def allowed_users(settings: Settings) -> list[str]:
    """The users who may look, as `user:password`; empty if everyone on this machine may. Raises SettingsError if other
    machines can reach the dashboard, and it has no users; or `flower_auth_file` is not valid."""
    if settings.flower_auth_file:
        return _read_users(expanded(settings.flower_auth_file, "flower_auth_file"))
    if not is_loopback(address_of(settings.flower_address, "flower_address").host):
        raise SettingsError(
            f"flower_address: {settings.flower_address!r} can be reached from other machines, and the dashboard would "
            "ask nobody for a password. Write a line `user:password` into a file that only you can read, and name it "
            "with --auth-file or EMBEDCTL_FLOWER_AUTH_FILE; or listen at 127.0.0.1"
        )
    return []


def _read_users(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError as error:
        raise SettingsError(f"flower_auth_file: {path} can't be read: {error.strerror}") from error
    except UnicodeDecodeError:
        # The error would show a part of the password. Browsers encode characters beyond ASCII differently.
        raise SettingsError(f"flower_auth_file: {path}: use ASCII characters only") from None
    users = []
    for number, line in enumerate(lines, 1):
        user, _, password = line.partition(":")
        if user and password:
            users.append(line)
        elif line.strip():
            raise SettingsError(f"flower_auth_file: {path}, line {number}: expected `user:password`")
    if not users:
        raise SettingsError(f"flower_auth_file: {path} names no user: write lines `user:password`")
    return users


try:
    from flower.command import extract_settings
    from flower.options import options
    from flower.urls import settings as page_settings
    from tornado.httpserver import HTTPServer
except ImportError as error:
    raise MissingExtra("flower", "the dashboard") from error

#: The newest tasks are remembered: 3 MB on disk, saved in less than a second, and 50 MB in memory.
_MAX_TASKS = 10_000
#: A killed dashboard loses at most this much of its history (ms).
_SAVE_EVERY_MS = 60_000
#: A worker that is gone for this long is no longer listed (seconds).
_FORGET_WORKERS_S = 24 * 3600
#: Time limit for a busy worker to answer an inspection (ms).
_INSPECT_MS = 3000.0
_COLUMNS = "name,args,state,received,runtime,worker,uuid,kwargs"


def serve(settings: Settings, say: Callable[[str], None]) -> None:
    """Show the dashboard until SIGTERM, or Ctrl-C, which is raised; `say` is told where it listens. Raises
    SettingsError if other machines can reach it and there is no authentication, and WorkerError if another dashboard of
    this user shows the same Redis."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("tornado.access").setLevel(logging.CRITICAL)  # each refusal; faults are logged elsewhere too
    logging.getLogger("flower.inspector").setLevel(logging.ERROR)  # each time that no worker answers at once
    users = allowed_users(settings)
    broker = Broker.connect(settings)
    try:
        broker.connection.now_ms()
        with _history(settings) as history:
            dashboard = Dashboard(broker, _configure(settings, users, history))
            url = _listen(dashboard, settings)
            whom = "the users in its auth file" if users else "everyone on this machine"
            say(f"Flower is at {url} for {whom}; stop with Ctrl-C")
            _run(dashboard)
    finally:
        broker.close()


def _configure(settings: Settings, users: Sequence[str], history: Path) -> Mapping[str, Any]:
    """Set Flower's options, which are global to the process. Returns the settings of its pages."""
    options.url_prefix = settings.flower_url_prefix.strip("/")
    options.basic_auth = list(users)
    options.cookie_secret = secrets.token_urlsafe(64)
    # Ending a worker or a task from here would bypass the job's state; `embedctl cancel` and SIGTERM respect it.
    options.read_only = True
    options.enable_events = False  # our workers always send them
    options.persistent = True
    options.db = str(history)
    options.state_save_interval = _SAVE_EVERY_MS
    options.max_tasks = _MAX_TASKS
    options.purge_offline_workers = _FORGET_WORKERS_S
    options.inspect_timeout = _INSPECT_MS
    options.tasks_columns = _COLUMNS
    # Only this tells Flower that its API needs no authentication either. It has no effect if there are users.
    os.environ["FLOWER_UNAUTHENTICATED_API"] = "0" if users else "1"
    extract_settings()
    return page_settings  # type: ignore[no-any-return]  # Flower ships no types


def _listen(dashboard: Dashboard, settings: Settings) -> str:
    listener, address = listen_at(settings.flower_address, "flower_address")
    listener.setblocking(False)
    HTTPServer(dashboard).add_socket(listener)
    return f"http://{address}/{options.url_prefix}"


def _run(dashboard: Dashboard) -> None:
    told: list[signal.Signals] = []
    loop = dashboard.io_loop.asyncio_loop

    def stop(number: signal.Signals) -> None:
        told.append(number)
        dashboard.io_loop.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    try:
        dashboard.start()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        dashboard.stop()
    if signal.SIGINT in told:
        raise KeyboardInterrupt


@contextmanager
def _history(settings: Settings) -> Iterator[Path]:
    """The file with the history of this Redis' dashboard, for one process at a time."""
    name = hashlib.sha256(without_password(settings.redis_url).encode()).hexdigest()[:32]
    folder = state_folder(settings) / f"flower-{name}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.mkdir(exist_ok=True, mode=0o700)
    except OSError as error:
        raise SettingsError(f"state_dir: {folder} can't be made: {error.strerror}") from error
    facts = folder.lstat()
    if facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        # Flower unpickles the file, which can run code of anyone who can write it.
        raise SettingsError(f"state_dir: {folder} must belong to you alone: remove it, or set another state_dir")
    taken = WorkerError(f"a dashboard of this Redis is running already (its state is in {folder})")
    with locked(folder / "running", taken=taken):
        yield folder / "history"
