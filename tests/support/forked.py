"""Runs commands and workers as forks of a process that has imported embedctl. Each starts in a tenth of the time.

Otherwise a fork is like a new process: it has its own variables, folder, standard streams, session and exit status, and
no code of embedctl has run in it before. Changes through PYTHONPATH need a fresh Python: in a fork, modules have their
names from one another already, so a change would miss some of them, and a test pass without its fault. So do tests of
how Python itself starts and ends. A fork can be changed by `prepare`, if the test fails where the change is missed.

What encodes with a model is a fork of another process, which has imported the libraries for it. They have read their
variables by then, so who changes those needs a fresh Python too. References are computed in such a fork itself.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import forkserver, process, resource_tracker, util
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from subprocess import DEVNULL, PIPE
from types import TracebackType
from typing import IO, Any, Self

from filelock import FileLock

_PRELOADED = [
    "billiard.pool",
    "celery.app.control",
    "celery.app.events",
    "celery.app.log",
    "celery.apps.worker",
    "celery.backends.base",
    "celery.events",
    "celery.worker.autoscale",
    "celery.worker.components",
    "celery.worker.consumer",
    "celery.worker.consumer.delayed_delivery",
    "celery.worker.strategy",
    "kombu.transport.redis",
    "psutil",
    "embedctl.cli",
    "embedctl.cli.disposal",
    "embedctl.cli.fetch",
    "embedctl.cli.jobs",
    "embedctl.cli.listing",
    "embedctl.cli.run",
    "embedctl.cli.status",
    "embedctl.cli.submit",
    "embedctl_workers.commands.worker",
    "embedctl_workers.serving.lifecycle",
    "embedctl_workers.backends.dummy",
    "embedctl_workers.commands.up",
    "embedctl_gateway.serving.serve",
    "encodings.ascii",
    # What commands import as they need it, where it is installed. LanceDB itself starts a thread, which no fork has: so
    # only the most of what it imports is here.
    "filelock",
    "orjson",
    "rich._emoji_codes",
    "sqlite3",
    "s3fs",
    "aiobotocore.session",
    "httpcore",
    "portalocker",
    "qdrant_client",
    "pandas",
    "pyarrow.dataset",
    "embedctl.sync.cache",
    "embedctl.sync.earlier",
    "embedctl.sync.earlier_parquet",
    "embedctl.sync.merged",
    "embedctl.destinations.parts",
    "embedctl.destinations.parquet",
    "embedctl.destinations.postgresql",
    "embedctl.destinations.qdrant",
    "lance_namespace",
    "deprecation",
    "overrides",
    "tqdm",
    "tests.support.limits",
    "tests.support.made_scripts",
    "tests.support.prepared",
    __name__,
]

#: Commands that become another program, and its module.
_PROGRAMS = {
    "gateway": "embedctl_gateway.__main__",
    "model": "embedctl_workers.commands.model",
    "up": "embedctl_workers.commands.up",
    "worker": "embedctl_workers.commands.worker",
}


#: What the names of variables begin with that the libraries of models read while they load.
_READ_AT_LOAD = ("ATEN_", "GOMP_", "HF_", "HUGGINGFACE_", "KMP_", "MKL_", "NPY_", "OMP_", "ONEDNN_", "TORCH_", "XDG_")


def can_be_forked(environment: Mapping[str, str], *, model: bool = False) -> bool:
    """Whether a process with these variables would import the same modules as this one, with the same result.

    Args:
        model: whether it imports the libraries of models before the command begins.
    """
    names = {name for name in (*environment, *os.environ) if model and name.startswith(_READ_AT_LOAD)}
    return all(environment.get(name) == os.environ.get(name) for name in {"PYTHONPATH", *names})


class _Descriptor:
    """A file descriptor that goes to the fork."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getstate__(self) -> Any:
        return DupFd(self.number)

    def __setstate__(self, state: Any) -> None:
        self.number = state.detach()


@dataclass(frozen=True)
class _Call:
    """The command that a fork runs, and its surroundings: its standard streams are in their order."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: Path | None
    streams: Sequence[_Descriptor]
    prepare: Callable[[], None] | None
    model: bool


class Forked:
    """A fork, with those parts of :class:`subprocess.Popen` that tests use.

    Args:
        arguments: of the command line `embedctl`. Without `model`, a worker must be one of the backend `dummy`.
        folder: the one that it runs in; None is this process' own.
        out: where standard output goes: a file's path, to whose end it is written, or what Popen takes.
        err: the same for standard error.
        stdin: what Popen takes.
        prepare: what the fork runs before the command; it is pickled.
        model: whether it is forked from the process that has imported the libraries of models.

    Attributes:
        stdin, stdout, stderr: our ends of the pipes, for text.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path | None,
        out: Path | int = PIPE,
        err: Path | int = PIPE,
        *,
        stdin: int = DEVNULL,
        prepare: Callable[[], None] | None = None,
        model: bool = False,
    ) -> None:
        assert can_be_forked(environment, model=model), "a fork does not see what these variables change"
        self.args = list(arguments)
        theirs: list[int] = []
        self.stdin = self._stream(theirs, stdin, "w")
        self.stdout = self._stream(theirs, out, "r")
        self.stderr = self._stream(theirs, err, "r")
        call = _Call(self.args, dict(environment), folder, [_Descriptor(number) for number in theirs], prepare, model)
        self._process = _started(_run, (call,), model=model)
        for number in theirs:
            os.close(number)
        assert self._process.pid
        self.pid: int = self._process.pid

    @staticmethod
    def _stream(theirs: list[int], wanted: Path | int, mode: str) -> IO[str] | None:
        """Add the fork's end of a stream; return ours, if it is a pipe."""
        if isinstance(wanted, Path):
            theirs.append(os.open(wanted, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
        elif wanted == DEVNULL:
            theirs.append(os.open(os.devnull, os.O_RDWR))
        elif wanted != PIPE:
            theirs.append(os.dup(wanted))
        else:
            ends = os.pipe()
            theirs.append(ends[mode == "r"])
            return os.fdopen(ends[mode != "r"], mode, encoding="utf-8", errors="replace")
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        if error is not None:  # nobody tells it to end any more, and the error is what is to be seen
            self.kill()
        self.wait()

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, timeout: float | None = None) -> int:
        """The exit status.

        Raises:
            subprocess.TimeoutExpired: the process has not ended by then.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it says through its pipes until it ends.

        Raises:
            subprocess.TimeoutExpired: the process has not ended by then.
        """
        with ThreadPoolExecutor(2) as pool:
            said = [pool.submit(stream.read) if stream else None for stream in (self.stdout, self.stderr)]
            if self.stdin is not None:
                with suppress(BrokenPipeError):
                    self.stdin.close()
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()  # or nothing would end the reading
                raise
        out, err = ("" if each is None else each.result() for each in said)
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


#: A process that a test started, either way.
Process = subprocess.Popen[bytes] | Forked


def run_forked(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    *,
    stdin: str | None = None,
    prepare: Callable[[], None] | None = None,
    model: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end.

    Raises:
        subprocess.TimeoutExpired: the process has not ended after two minutes, and is killed.
    """
    with tempfile.TemporaryDirectory() as own:
        out, err, given = Path(own, "out"), Path(own, "err"), Path(own, "in")
        given.write_text(stdin or "")
        with given.open() as stream:
            fork = Forked(arguments, environment, folder, out, err, stdin=stream.fileno(), prepare=prepare, model=model)
        try:
            status = fork.wait(120)
        finally:
            fork.kill()
        return subprocess.CompletedProcess(fork.args, status, out.read_text(), err.read_text())


def status_of_fork(function: Callable[..., None], *given: Any, model: bool = False) -> int:
    """The exit status of a fork that calls a function; both are pickled."""
    fork = _started(function, given, model=model)
    fork.join(120)
    fork.kill()
    fork.join()
    assert fork.exitcode is not None
    return fork.exitcode


@dataclass(frozen=True)
class Sharing:
    """A folder by which all processes of one run of pytest find the same fork servers.

    What a server imports takes 5 to 12 CPU s. It ends when nobody has the pipe in the folder open for writing any more:
    that is, with the process that has made the folder and all that came to it.
    """

    folder: Path

    @classmethod
    def begin(cls) -> Sharing:
        """Make the folder, and hold the pipe; both until this process ends."""
        folder = Path(tempfile.mkdtemp(prefix="ec-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.mkfifo(folder / "alive")
        os.open(folder / "alive", os.O_RDWR)  # for writing alone would wait for a reader
        return cls(folder)

    def join(self) -> None:
        for server in (_PLAIN, _MODEL):
            server.sharing = self


class _Server(forkserver.ForkServer):
    """A fork server that other processes may have started.

    Attributes:
        pid: the server that this process has started.
        sharing: where the other processes find it; None until one is needed.
    """

    sharing: Sharing | None = None

    def __init__(self, name: str, modules: list[str], parent: _Server | None = None) -> None:
        """
        Args:
            parent: the server that it is a fork of, so that it need not import again what that has imported.
        """
        super().__init__()
        self.set_forkserver_preload(modules)
        self._name, self._modules, self._parent = name, modules, parent

    @property
    def pid(self) -> int | None:
        return self._forkserver_pid

    def ensure_running(self) -> None:
        if self._forkserver_address is None:
            if self.sharing is None:
                Sharing.begin().join()
            assert self.sharing
            if self._parent is not None:
                self._parent.ensure_running()  # it takes the same lock
            with FileLock(self.sharing.folder / "lock"):
                self._find(self.sharing.folder)

    def _find(self, folder: Path) -> None:
        resource_tracker.ensure_running()
        address = folder / self._name
        if not address.exists():
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(address))
                listener.listen()
                self._start(listener.fileno(), folder)
        self._forkserver_address = str(address)
        self._forkserver_alive_fd = os.open(folder / "alive", os.O_WRONLY)

    def _start(self, listener: int, folder: Path) -> None:
        alive = os.open(folder / "alive", os.O_RDONLY)
        if self._parent is None:
            main = f"main({listener}, {alive}, {self._modules}, sys_path={sys.path})"
            # What is imported stays, so looking for garbage in it would be a quarter of the time.
            code = f"import gc; gc.disable(); from multiprocessing.forkserver import main; {main}"
            python = os.fsencode(sys.executable)
            self._forkserver_pid = util.spawnv_passfds(python, [sys.executable, "-c", code], [listener, alive])
        else:
            ends = [_Descriptor(listener), _Descriptor(alive)]
            server = _launched(_serve, (self._modules, *ends), self._parent)
            process._children.discard(server)  # type: ignore[attr-defined]  # it would end with this process
            assert server.pid is not None
            self._forkserver_pid = server.pid
        os.close(alive)


_PLAIN = _Server("plain", _PRELOADED)
_MODEL = _Server("model", ["tests.support.model_libraries"], _PLAIN)
_LAUNCHING = threading.Lock()


def _started(function: Callable[..., None], given: Sequence[Any], *, model: bool) -> ForkServerProcess:
    return _launched(_in_fork, (function, *given), _MODEL if model else _PLAIN)


def _launched(function: Callable[..., None], given: Sequence[Any], server: _Server) -> ForkServerProcess:
    made = ForkServerProcess(target=function, args=given, daemon=True)
    server.ensure_running()
    with _LAUNCHING:
        # The standard library knows one server, so it is told of ours meanwhile.
        known = forkserver.connect_to_new_process
        forkserver.connect_to_new_process = server.connect_to_new_process
        try:
            made.start()
        finally:
            forkserver.connect_to_new_process = known
    return made


def _serve(modules: list[str], listener: _Descriptor, alive: _Descriptor) -> None:
    """Be another server. It keeps nobody's pipe open, or it would never end."""
    gc.disable()
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]  # each fork is given one
    forkserver.main(listener.number, alive.number, modules)


def _in_fork(function: Callable[..., None], *given: Any) -> None:
    gc.freeze()
    gc.enable()
    function(*given)


def _run(call: _Call) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(call.environment)
    if call.folder is not None:
        os.chdir(call.folder)
    for number, stream in enumerate(call.streams):
        os.dup2(stream.number, number)
        os.close(stream.number)
    if os.isatty(0):
        # Ctrl-C is a signal only to those whose terminal it is typed at.
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
    from tests.support.limits import put_limits

    put_limits()
    if call.prepare is not None:
        call.prepare()
    name, *others = call.arguments
    if name in ("worker", "model"):
        from embedctl_workers.machine import devices

        # Nothing may be imported before a process is pinned, because imports fix the size of thread pools. The dummy
        # uses no thread pool, and the backends with a model give theirs its size.
        devices._SIZES_THREADS_AT_IMPORT = ()  # type: ignore[assignment]  # mypy takes the four names for its type
    if call.model:
        from tests.support import references_here

        references_here.stand_in()
    if name in _PROGRAMS:
        import_module(_PROGRAMS[name]).main(others, prog_name=f"embedctl {name}")
    else:
        from embedctl.cli import main

        main(call.arguments, prog_name="embedctl")
