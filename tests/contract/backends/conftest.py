"""The tests of backends share what every load of a model would make anew with the same result."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from embedctl_config.hardware import ModelEntry
from embedctl_workers.machine.host import Host
from embedctl_workers.models import compiling, references
from embedctl_workers.models.files import resolve_model
from embedctl_workers.models.wordpiece import load
from tests.support.references_here import compute_here
from tests.support.tiny_models import FilesOf, MakeModel


@pytest.fixture(scope="session", autouse=True)
def made_once(shared_folder: Path) -> Iterator[None]:
    """Libraries are compiled, and compiled tokenizers are checked, once for each input in the whole run."""
    kept = shared_folder / "compiled"
    kept.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "_made", _kept_in(kept, compiling._made))
        patch.setattr(load, "_agrees", _of_the_tokenizer(load._agrees))
        yield


@pytest.fixture(scope="module", autouse=True)
def references_here() -> Iterator[None]:
    """References are computed in this process, which has torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(references, "_compute", compute_here)
        yield


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    """With one cache for all tests, so that nothing is built twice."""
    return Host(threads=1, cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture
def seeded() -> Iterator[None]:
    """The same random numbers each time, two threads, and no gradients."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    with torch.inference_mode():
        yield


@pytest.fixture
def files_of(tiny_model: MakeModel) -> FilesOf:
    return lambda tiny: resolve_model("tiny", ModelEntry(str(tiny_model(tiny))))


def _kept_in(kept: Path, make: Any) -> Any:
    def once(compiler: str, flags: Sequence[str], name: str, texts: Sequence[tuple[str, str]], folder: Path) -> bytes:
        path = kept / hashlib.sha256(repr((compiler, flags, name, texts)).encode()).hexdigest()
        if not path.exists():
            made: bytes = make(compiler, flags, name, texts, folder)
            whole = path.with_suffix(f".{os.getpid()}")
            whole.write_bytes(made)
            whole.rename(path)
        return path.read_bytes()

    return once


def _of_the_tokenizer(agrees: Any) -> Any:
    @functools.cache
    def known(*_: str) -> list[bool]:
        return []

    def once(fast: object, library: Any, rules: object) -> bool:
        answer = known(library.to_str(), repr(rules))
        if not answer:
            answer.append(agrees(fast, library, rules))
        return answer[0]

    return once
