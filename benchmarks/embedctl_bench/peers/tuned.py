"""A system at the fastest of its settings, in a process of its own; and the reference for its vectors."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import ceil, inf, nan
from pathlib import Path
from typing import Any

import numpy as np

from embedctl_bench.peers.adapters.embedctl_adapters.serving import Answer, Vectors
from embedctl_bench.peers.child import ChildProcess, Unavailable, answering
from embedctl_bench.peers.environments import environment_for, python_of
from embedctl_bench.peers.models import Model, converted
from embedctl_bench.peers.registry import SENTENCE_TRANSFORMERS, Setting, System
from embedctl_workers.machine.devices import SPIN_VARIABLE, SPINS, THREAD_VARIABLES
from embedctl_workers.models.files import fingerprint_of

#: A tuning run encodes this much of the workload: seconds, not minutes, whatever the model.
_SAMPLE_FLOPS = 5e11
_FEWEST_SAMPLES = 32


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a system over a load.

    Attributes:
        seconds: from the texts to the last vector; of a load that is sampled, of one request.
        latencies: of the requests (seconds): since all were made, or since this one was.
        idle: the share of time during which the GPU was idle; NaN if that is not known.
    """

    seconds: float
    tokens: int
    latencies: Sequence[float] = ()
    idle: float = nan


@dataclass(frozen=True)
class Workload:
    """Texts for all systems.

    Attributes:
        lengths: of the texts, in tokens of the model, special tokens included.
        chunk: the largest number of texts that a process gets at once.
    """

    name: str
    texts: Sequence[str]
    lengths: tuple[int, ...]
    chunk: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.texts).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Task:
    """What a system is to encode, and where.

    Attributes:
        workload: the texts; systems choose their settings on a sample of them.
        cpus: it runs on these.
        place: the folder of environments and of everything that is made for them.
    """

    model: Model
    workload: Workload
    cpus: Sequence[int]
    place: Path


class TunedSystem:
    """A system in processes that share the CPUs evenly, at the setting that was fastest on a sample.

    Its logs are NAME-NUMBER.log in the folder `place`. All of its methods raise Unavailable if its environment, its
    model or the system itself fails.

    Attributes:
        chosen: its setting.
        tried: each setting tried on the sample, with its `seconds` or its `error`.
        computes: the precision of its products, read back from the loaded system; empty if that is not known.
    """

    chosen: Setting
    computes: str
    versions: Mapping[str, str]

    def __init__(self, system: System, task: Task, *, request: int = 0, whole: bool = False) -> None:
        """Start its processes, and let it choose its setting.

        Args:
            request: it chooses on concurrent requests with this number of texts each; 0: on one call.
            whole: it chooses on the whole workload, in one call, as a device needs that encodes a sample in no time.
        """
        self._system, self._task = system, task
        self._python = python_of(system.environment, task.place)
        self._folder = converted(task.model, system.form, task.place)
        self._texts = task.workload.texts
        self._tokens: dict[tuple[str, ...], int] = {}
        self._scratch = tempfile.TemporaryDirectory(prefix="embedctl-bench-")
        self._processes: list[ChildProcess] = []
        self._takes_requests = False
        size, at_once = len(self._texts), 0
        if not whole:
            size, at_once = sample_of(task, request=request, chunked=system.ours)
        self.tried: list[tuple[Setting, dict[str, Any]]] = []
        try:
            self._choose(self._texts[:: max(1, len(self._texts) // size)][:size], at_once)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Its processes, which may have others."""
        return [process.pid for process in self._processes]

    def encode(self, repeat: int = 1) -> Answer:
        """Encode the workload `repeat` times, in one call; the vectors are those of the first time."""
        done = self._encode(self._texts, repeat)
        return replace(done, tokens=done.tokens or repeat * self._count(self._texts))

    def requests(self, asked: Sequence[Sequence[str]], callers: int = 0) -> tuple[Run, Vectors]:
        """Make requests, all at once or by so many callers; one after the other if the system has no queue. The vectors
        are of all texts, one request after the other."""
        answers = self._requests(asked, callers)
        tokens = sum(answer.tokens for answer in answers) or self._count([text for texts in asked for text in texts])
        latencies = [answer.ended - answer.began for answer in answers]
        return Run(_seconds(answers), tokens, latencies), np.concatenate([answer.vectors for answer in answers])

    def close(self) -> None:
        """End its processes, and remove its files."""
        self._end()
        self._scratch.cleanup()

    def _choose(self, sample: Sequence[str], at_once: int) -> None:
        """Try the settings, and load the fastest."""
        fits = [each for each in self._system.settings if each.processes <= len(self._task.cpus)]
        for setting in fits:
            self.tried.append((setting, self._try(setting, sample, at_once, alone=len(fits) == 1)))
        if all("error" in found for _, found in self.tried):
            raise Unavailable(self.tried[0][1]["error"])
        self._load(min(self.tried, key=lambda each: each[1].get("seconds", inf))[0])

    def _try(self, setting: Setting, sample: Sequence[str], at_once: int, *, alone: bool) -> dict[str, Any]:
        """Seconds for the sample, as so many requests or one call: the better of two, after a run to warm up."""

        def seconds() -> float:
            if not at_once:
                return _seconds([self._encode(sample)])
            return _seconds(self._requests([sample[at::at_once] for at in range(at_once)]))

        try:
            self._load(setting)
            return {"seconds": 0.0 if alone else min([seconds() for _ in range(3)][1:])}
        except Unavailable as error:
            return {"error": str(error)}

    def _load(self, setting: Setting) -> None:
        """Start processes with a setting, unless those that run were loaded alike."""
        if self._processes and (self.chosen.processes, self.chosen.load) == (setting.processes, setting.load):
            self.chosen = setting
            return
        self._end()
        try:
            loaded = self._started(setting)
        except BaseException:
            self._end()
            raise
        self.chosen, self._takes_requests = setting, loaded["takes_requests"]
        self.computes, self.versions = loaded["computes"], loaded["versions"]

    def _started(self, setting: Setting) -> dict[str, Any]:
        """Start and load the processes of a setting: what the first one says of itself."""
        system, task = self._system, self._task
        share = len(task.cpus) // setting.processes
        package, variables = environment_for(system.environment)
        variables |= dict.fromkeys(THREAD_VARIABLES, str(share))
        variables[SPIN_VARIABLE] = SPINS  # as our worker sets it; no other system is slower for it
        ours = {"chunk": task.workload.chunk, "cache": str(task.place / "cache")} if system.ours else {}
        for at in range(setting.processes):
            # -P: nothing in the working directory is taken for a module.
            command = [str(self._python), "-P", "-m", package]
            process = ChildProcess(command, variables, task.place / f"{system.name}-{at}.log")
            self._processes.append(process)
            process.send(
                do="load",
                adapter=system.adapter,
                model=str(self._folder),
                cpus=task.cpus[at * share : (at + 1) * share],
                options={**setting.load, **ours, **system.fixed},
                packages=system.packages,
            )
        first, *_ = [process.answer() for process in self._processes]
        return first

    def _encode(self, texts: Sequence[str], repeat: int = 1) -> Answer:
        """Encode the texts; several processes get chunks of them in turn, at least two each."""
        processes = len(self._processes)
        most = -(-len(texts) // (2 * processes))
        size = len(texts) if processes == 1 else min(self._task.workload.chunk, most)
        chunks = [texts[at : at + size] for at in range(0, len(texts), size)]
        parts = [part for (part,) in self._deal([{"do": "encode", "texts": each, "repeat": repeat} for each in chunks])]
        began, ended = min(part.began for part in parts), max(part.ended for part in parts)
        vectors = np.concatenate([part.vectors for part in parts])
        return Answer(vectors, began, ended, sum(part.tokens for part in parts))

    def _requests(self, asked: Sequence[Sequence[str]], callers: int = 0) -> list[Answer]:
        if self._takes_requests:
            count = len(self._processes)
            shares = [{"do": "requests", "requests": asked[at::count], "callers": callers} for at in range(count)]
            parts = self._deal(shares)
            return [parts[at % count][at // count] for at in range(len(asked))]
        made = time.monotonic()
        answers = [one for (one,) in self._deal([{"do": "encode", "texts": texts} for texts in asked])]
        return answers if callers else [replace(answer, began=made) for answer in answers]

    def _deal(self, calls: Sequence[Mapping[str, Any]]) -> list[list[Answer]]:
        """The answers to each call, which goes to the next process that is free. After an error, none runs."""
        try:
            return self._dealt(calls)
        except BaseException:
            self._end()  # the others may be at work
            raise

    def _dealt(self, calls: Sequence[Mapping[str, Any]]) -> list[list[Answer]]:
        found: list[list[Answer]] = [[] for _ in calls]
        waiting, free = deque(range(len(calls))), [*self._processes]
        busy: dict[ChildProcess, int] = {}
        while waiting or busy:
            while waiting and free:
                process, at = free.pop(), waiting.popleft()
                process.send(**calls[at], options=self.chosen.encode, vectors=self._file(at))
                busy[process] = at
            for process in answering([*busy]):
                told = process.answer()["answers"]
                at = busy.pop(process)
                free.append(process)
                ends = [*accumulate(rows for rows, *_ in told)]
                vectors = np.split(np.load(self._file(at)), ends[:-1])
                found[at] = [Answer(each, *facts) for each, (_, *facts) in zip(vectors, told, strict=True)]
        return found

    def _file(self, at: int) -> str:
        return f"{self._scratch.name}/{at}.npy"

    def _count(self, texts: Sequence[str]) -> int:
        """Tokens of texts that the system encodes; those of the same texts are counted once."""
        key = tuple(texts)
        if key not in self._tokens:
            self._tokens[key] = self._processes[0].call(do="count", texts=texts)["tokens"]
        return self._tokens[key]

    def _end(self) -> None:
        for process in self._processes:
            process.close()
        self._processes = []


def _seconds(answers: Sequence[Answer]) -> float:
    """Until the last request was answered, from when the first was made."""
    return max(answer.ended for answer in answers) - min(answer.began for answer in answers)


def reference_of(task: Task, device: str = "cpu") -> Vectors:
    """Vectors of sentence-transformers on torch in fp32, computed once and kept; raises Unavailable if they can't be.

    On a CPU, texts are encoded one at a time, so without padding; on another device, by torch's name, that would take
    too long.
    """
    alone = (Setting(1, {"backend": "torch", "device": device}, {"batch": 1 if device == "cpu" else 32}),)
    system = replace(SENTENCE_TRANSFORMERS, name="reference", settings=alone)
    name = f"{task.model.name}-{fingerprint_of(task.model.folder)[:32]}-{task.workload.name}-{task.workload.digest}"
    kept = task.place / "reference" / f"{name}{'' if device == 'cpu' else f'-{device}'}.npy"
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        loaded = TunedSystem(system, task)
        try:
            np.save(kept.with_suffix(".unfinished.npy"), loaded.encode().vectors)
        finally:
            loaded.close()
        shutil.move(kept.with_suffix(".unfinished.npy"), kept)
    vectors: Vectors = np.load(kept)
    return vectors


def sample_of(task: Task, *, request: int, chunked: bool) -> tuple[int, int]:
    """The number of texts that a setting is tried with, and of the requests that they are split into; 0 for one call.

    Requests are as large as those that will be measured, because a batch can't be larger than a request. Their number
    is even, and at least that of the CPUs, so that processes have equal shares. The same holds for chunks.
    """
    workload, texts = task.workload, len(task.workload.lengths)
    wanted = max(_FEWEST_SAMPLES, round(_SAMPLE_FLOPS / task.model.flops_per_token / workload.tokens * texts))
    if request:
        at_once = min(texts // request, max(2, len(task.cpus), 2 * round(wanted / (2 * request))))
        return at_once * request, at_once
    if chunked:
        wanted = 2 * workload.chunk * ceil(wanted / (2 * workload.chunk))
    return min(texts, wanted), 0
