"""How many small faults the tests notice: mutants of the store, of what is written, and of retrying and waiting.

`make mutants` runs it. A mutant is one change of one place, made by an operator of cosmic-ray: another comparison,
another number, a loop that never runs. The sample is drawn with a fixed seed, so two states of the tests can be
compared. A mutant is tried with the tests that reach its line, the quickest first, until one fails. Tests that start
processes are left out, because those would run the code as it is.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

ROOT = Path(__file__).parents[2]
#: What is mutated, and the tests that are to notice it.
PRODUCER, CONFIG = "producer/embedctl", "config/embedctl_config"
MODULES = (
    f"{CONFIG}/retry.py",
    *(f"{PRODUCER}/{each}.py" for each in ("store/*", "destinations/*", "waiting/*", "queueing/*")),
)
TESTS = (
    "tests/unit/producer",
    "tests/unit/config",
    "tests/contract/store",
    "tests/contract/destinations",
    "tests/contract/chunk_files",
)
#: Of the tests that reach a mutant, as many as take this long together are tried (seconds, and tests).
TRIED_S, TRIED = 20.0, 60
#: A mutant that makes its tests wait this long is noticed (seconds).
LIMIT_S = 60.0
#: What a fork need not import again: packages of others.
_PRELOADED = (
    "celery.app.base",
    "kombu.transport.redis",
    "hypothesis",
    "numpy",
    "orjson",
    "redis.asyncio",
    "rich.table",
    "click",
    "pytest",
)


@dataclass(frozen=True)
class Mutant:
    """One change: an operator of cosmic-ray at one of the places in a file that it can change."""

    file: str
    operator: str
    arguments: dict[str, Any]
    occurrence: int
    line: int

    @property
    def module(self) -> str:
        return self.file.removesuffix(".py").removesuffix("/__init__").partition("/")[2].replace("/", ".")

    def source(self) -> str:
        from cosmic_ray.mutating import mutate_code
        from cosmic_ray.plugins import get_operator

        changed = mutate_code(
            (ROOT / self.file).read_text(), get_operator(self.operator)(**self.arguments), self.occurrence
        )
        return str(changed)


def sample(size: int, seed: int) -> list[Mutant]:
    """Mutants that change what the code does, no two of one line."""
    from cosmic_ray.commands.init import _all_work_items

    by_line: dict[tuple[str, int], list[Mutant]] = defaultdict(list)
    if missing := [pattern for pattern in MODULES if not list(ROOT.glob(pattern))]:
        raise click.ClickException(f"no file is {', '.join(missing)}")
    files = sorted(file for pattern in MODULES for file in ROOT.glob(pattern))
    for item in _all_work_items(files, {}):
        (spec,) = item.mutations
        file = str(Path(spec.module_path).relative_to(ROOT))
        mutant = Mutant(file, spec.operator_name, spec.operator_args, spec.occurrence, spec.start_pos[0])
        by_line[file, mutant.line].append(mutant)
    rng = random.Random(seed)
    lines = sorted(by_line)
    rng.shuffle(lines)
    found: list[Mutant] = []
    for line in lines:
        mutant = rng.choice(by_line[line])
        if len(found) == size:
            break
        try:
            source = mutant.source()
        except AttributeError:  # cosmic-ray takes each exception for a plain name, and fails at one with a dot
            continue
        if _meaning(source) not in ("", _meaning((ROOT / mutant.file).read_text())):
            found.append(mutant)
    return found


def _meaning(source: str) -> str:
    """The source without annotations, which decide nothing; empty if it is no Python."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign):
            node.annotation = ast.Constant(None)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
    return ast.dump(tree)


# --- which tests reach which line ---------------------------------------------------------------------------------


class Reached:
    """A plugin of pytest that notes, in each process, which test reaches which lines, and how long it takes."""

    def __init__(self, folder: Path) -> None:
        from coverage import Coverage

        place = folder / f"reached-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"
        self._coverage = Coverage(data_file=str(place), source=[str(ROOT / each) for each in (PRODUCER, CONFIG)])
        self._seconds: dict[str, float] = {}
        self._place = place.with_suffix(".json")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.start()
        self._coverage.switch_context(item.nodeid)
        began = time.monotonic()
        try:
            return (yield)
        finally:
            self._coverage.stop()
            self._seconds[item.nodeid] = time.monotonic() - began

    def pytest_sessionfinish(self) -> None:
        self._coverage.save()
        self._place.write_text(json.dumps(self._seconds))


def pytest_configure(config: pytest.Config) -> None:
    if folder := os.environ.get("REACHED"):
        config.pluginmanager.register(Reached(Path(folder)))


def reached(folder: Path, processes: int) -> tuple[dict[str, dict[int, list[str]]], dict[str, float]]:
    """The tests of each line of each file, and how long each test takes; measured once and kept in the folder."""
    from coverage import CoverageData

    if not list(folder.glob("reached-*.json")):
        folder.mkdir(parents=True, exist_ok=True)
        options = ["-p", "tests.support.mutants", "-n", str(processes), "-q", "-m", "not slow and not browser"]
        subprocess.run(
            [sys.executable, "-m", "pytest", *options, *TESTS], cwd=ROOT, env={**os.environ, "REACHED": str(folder)}
        )
    seconds: dict[str, float] = {}
    lines: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for place in folder.glob("reached-*.json"):
        seconds |= json.loads(place.read_text())
        data = CoverageData(str(place.with_suffix("")))
        data.read()
        for file in data.measured_files():
            for line, contexts in data.contexts_by_lineno(file).items():
                lines[str(Path(file).relative_to(ROOT))][line] += filter(None, contexts)
    return lines, seconds


# --- one mutant -----------------------------------------------------------------------------------------------------


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from changed source."""

    def __init__(self, mutant: Mutant, source: str) -> None:
        self._mutant, self._source = mutant, source

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._mutant.module:
            return None
        file = ROOT / self._mutant.file
        folders = [str(file.parent)] if file.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(name, file, loader=self, submodule_search_locations=folders)

    def exec_module(self, module: ModuleType) -> None:
        code = compile(self._source, str(ROOT / self._mutant.file), "exec", dont_inherit=True)
        exec(code, module.__dict__)


def outcomes(trials: Mapping[int, tuple[Mutant, Sequence[str], Path]], processes: int) -> Iterator[tuple[int, str]]:
    """What the tests say of each mutant, by its number, as it becomes known. Each runs in a fork of this process."""
    for name in _PRELOADED:
        importlib.import_module(name)
    waiting, running = list(trials.items())[::-1], dict[int, tuple[int, int, float]]()
    while waiting or running:
        while waiting and len(running) < processes:
            at, (mutant, tests, log) = waiting.pop()
            source = mutant.source()
            if not (pid := os.fork()):
                _try(mutant, source, tests, log)
            running[os.pidfd_open(pid)] = at, pid, time.monotonic() + LIMIT_S
        ended = select.select(list(running), [], [], 1.0)[0]
        for handle, (at, pid, until) in list(running.items()):
            late = time.monotonic() > until
            if handle in ended or late:
                if late:
                    os.killpg(pid, signal.SIGKILL)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.close(handle)
                del running[handle]
                yield at, "survived" if status == 0 else "killed (time)" if late else "killed"


def _try(mutant: Mutant, source: str, tests: Sequence[str], log: Path) -> None:
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.meta_path.insert(0, _Changed(mutant, source))
    sys.path[:0] = [str(ROOT)]
    status = 1
    try:
        status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]))
    finally:
        os._exit(status)


def chosen(mutant: Mutant, lines: dict[str, dict[int, list[str]]], seconds: dict[str, float]) -> list[str]:
    """The tests that reach the mutant's line, or else its file, the quickest first, within the limits."""
    of_file = lines.get(mutant.file, {})
    names = set(of_file.get(mutant.line, ())) or {name for each in of_file.values() for name in each}
    taken: list[str] = []
    sum_s = 0.0
    for name in sorted(names, key=lambda name: (seconds[name], name))[:TRIED]:
        sum_s += seconds[name]
        if taken and sum_s > TRIED_S:
            break
        taken.append(name)
    return taken


@click.command()
@click.option("--size", default=320, show_default=True, help="How many mutants are tried.")
@click.option("--seed", default=37, show_default=True)
@click.option("--processes", default=2, show_default=True)
@click.option("--folder", default=ROOT / "build" / "mutants", type=click.Path(path_type=Path), show_default=True)
def main(size: int, seed: int, processes: int, folder: Path) -> None:
    """Try mutants, and print how many the tests noticed."""
    lines, seconds = reached(folder, processes)
    mutants = sample(size, seed)
    (folder / "logs").mkdir(exist_ok=True)

    trials = {
        at: (mutant, tests, folder / "logs" / f"{at}.log")
        for at, mutant in enumerate(mutants)
        if (tests := chosen(mutant, lines, seconds))
    }
    found = ["not reached"] * len(mutants)
    for at, each in outcomes(trials, processes):
        mutant, tests, log = trials[at]
        found[at] = each
        print(f"{each}: {mutant.file}:{mutant.line} {mutant.operator} ({len(tests)} tests, {log.name})", flush=True)
    rows = [{**asdict(mutant), "outcome": each} for mutant, each in zip(mutants, found, strict=True)]
    (folder / "outcomes.json").write_text(json.dumps(rows, indent=1))
    print(", ".join(f"{count} {name}" for name, count in Counter(found).most_common()))


if __name__ == "__main__":
    main()
