"""Whatever makes a worker's vectors wrong fails the gate; what is right passes it."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from embedctl_config.hardware import HardwareClass, Precision
from embedctl_workers.accuracy.gate import measure_backend
from embedctl_workers.accuracy.report import Report
from embedctl_workers.arrays.tokens import Ragged, Rows, Side, Tokens, Vectors
from embedctl_workers.backends import load_backend
from embedctl_workers.backends.base import Backend
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.machine.host import Host
from embedctl_workers.models.files import resolve_model
from tests.support.other_outputs import make_three
from tests.support.tiny_models import Tiny, make_model

MINILM = "all-MiniLM-L6-v2"
#: Their raw vectors are not of unit length, as those of MiniLM are.
TINY = {"bert": Tiny(prompt="passage: "), "qwen": Tiny("qwen3", pooling="lasttoken", max_seq_length=100)}

Sabotage = Callable[[Path], None]
BackendOf = Callable[[str], Backend]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: make_model(tmp_path_factory.mktemp(name), tiny) for name, tiny in TINY.items()}
    three = make_three(tmp_path_factory.mktemp("three"), Tiny("xlm-roberta", pooling="cls"))
    return {"MiniLM": resolve_model(MINILM).folder, "three heads": three, **made}


@pytest.fixture(scope="module")
def backend_of(folders: dict[str, Path], host: Host) -> BackendOf:
    """The backend of a good model. It is loaded when a test asks for it: most models are for the slow suite."""
    return functools.cache(lambda name: load(folders[name], host))


def load(folder: Path, host: Host) -> Backend:
    # AMX's products, where they are the fastest, are not as close: test_tiles.py has their bounds.
    return load_backend("torch", str(folder), entry=None, host=host, options={"products": "plain"})


def examine(backend: Backend, host: Host, precision: Precision = "fp32") -> Report:
    report = measure_backend(ChunkEncoder(backend, 1024), HardwareClass(precision=precision), host)
    assert report is not None
    return report


def failed(report: Report) -> set[str]:
    return {check.name for check in report.checks if not check.passed}


def case(*values: Any, model: str, name: str) -> Any:
    """A parametrised case; small models are enough for the quick suite."""
    return pytest.param(*values, id=name, marks=[] if model in ("bert", "three heads") else [pytest.mark.slow])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "precision"), [("MiniLM", "fp32"), ("bert", "fp16"), ("bert", "int8"), ("qwen", "fp32")]
)
def test_torch_passes_the_gate_clearly(backend_of: BackendOf, host: Host, model: str, precision: Precision) -> None:
    report = examine(backend_of(model), host, precision)
    assert report.passed, report
    bound = 2.0**-12 if precision == "fp16" else 2e-6  # vectors of fp16 are measured as they are stored, in float16
    assert all(check.measured.max_abs_error < bound for check in report.checks), report
    assert all(check.measured.length_error < 1e-5 for check in report.checks), report


def copy_of(folder: Path, to: Path) -> Path:
    """A copy whose files may be replaced; large ones are links until then."""
    return Path(shutil.copytree(folder, to, copy_function=os.symlink))


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    value = change(json.loads(path.read_text(encoding="utf-8")))
    path.unlink()
    path.write_text(json.dumps(value), encoding="utf-8")


def pooling(mode: str) -> Sabotage:
    def change(config: dict[str, Any]) -> dict[str, Any]:
        return {**{key: value for key, value in config.items() if "pooling_mode" not in key}, mode: True}

    return lambda folder: rewrite(folder / "1_Pooling" / "config.json", change)


def weights(change: Callable[[torch.Tensor], torch.Tensor]) -> Sabotage:
    def sabotage(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = {name: change(value) for name, value in load_file(path).items()}
        path.unlink()
        save_file({name: value.contiguous() for name, value in tensors.items()}, path, metadata={"format": "pt"})

    return sabotage


def crushed(levels: int) -> Sabotage:
    """Weights of few levels, as of a quantisation that went wrong."""

    def change(value: torch.Tensor) -> torch.Tensor:
        step = value.abs().max() / levels
        return (value / step).round() * step if value.is_floating_point() and value.dim() == 2 else value

    return weights(change)


def no_lower_case(folder: Path) -> None:
    def change(tokenizer: dict[str, Any]) -> dict[str, Any]:
        return {**tokenizer, "normalizer": {**tokenizer["normalizer"], "lowercase": False, "strip_accents": False}}

    rewrite(folder / "tokenizer.json", change)
    # transformers makes the normaliser anew from this.
    rewrite(folder / "tokenizer_config.json", lambda config: {**config, "do_lower_case": False, "strip_accents": False})


def shorter(folder: Path) -> None:
    rewrite(folder / "sentence_bert_config.json", lambda config: {**config, "max_seq_length": 24})


FILES: list[tuple[str, str, Sabotage, Precision]] = [
    ("MiniLM", "cls pooling", pooling("pooling_mode_cls_token"), "int8"),
    ("qwen", "mean pooling", pooling("pooling_mode_mean_tokens"), "fp32"),
    ("bert", "fp16 weights", weights(lambda value: value.to(torch.float16)), "fp32"),
    ("MiniLM", "too few levels", crushed(7), "int8"),
    ("MiniLM", "no lower case", no_lower_case, "int8"),
    ("qwen", "cuts too early", shorter, "int8"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "sabotage", "precision"),
    [
        case(model, do, precision, model=model, name=f"{what} ({model}, {precision})")
        for model, what, do, precision in FILES
    ],
)
def test_other_files_than_the_models_fail(
    folders: dict[str, Path],
    backend_of: BackendOf,
    host: Host,
    tmp_path: Path,
    model: str,
    sabotage: Sabotage,
    precision: Precision,
) -> None:
    folder = copy_of(folders[model], tmp_path / "copy")
    sabotage(folder)
    backend = load(folder, host)
    backend.reference = backend_of(model).reference
    report = examine(backend, host, precision)
    assert "in batches" in failed(report), report


def test_weights_of_another_model_fail(backend_of: BackendOf, host: Host, tmp_path: Path) -> None:
    backend = load(make_model(tmp_path, dataclasses.replace(TINY["bert"], seed=1)), host)
    backend.reference = backend_of("bert").reference
    for precision in ("fp32", "fp16", "int8"):
        assert {"in batches", "prompt, raw"} <= failed(examine(backend, host, precision))


class Proxy:
    def __init__(self, good: Backend) -> None:
        self._good: Any = good

    def __getattr__(self, name: str) -> Any:
        return getattr(self._good, name)

    def tokenize(self, texts: Sequence[str], prompt: str | None, truncation_side: Side | None = None) -> Tokens:
        tokens: Tokens = self._good.tokenize(texts, prompt, truncation_side)
        return tokens

    def forward(self, tokens: Tokens, rows: Rows) -> Any:
        return self._good.forward(tokens, rows)

    def finish(self, output: Any, *, normalize: bool) -> Vectors:
        vectors: Vectors = self._good.finish(output, normalize=normalize)
        return vectors


class NoPrompt(Proxy):
    def tokenize(self, texts: Sequence[str], prompt: str | None, truncation_side: Side | None = None) -> Tokens:
        return super().tokenize(texts, "", truncation_side)


class WrongPrompt(Proxy):
    def tokenize(self, texts: Sequence[str], prompt: str | None, truncation_side: Side | None = None) -> Tokens:
        return super().tokenize(texts, prompt and "passage: ", truncation_side)


class NeverNormalised(Proxy):
    def finish(self, output: Any, *, normalize: bool) -> Vectors:
        return super().finish(output, normalize=False)


class AlwaysNormalised(Proxy):
    def finish(self, output: Any, *, normalize: bool) -> Vectors:
        return super().finish(output, normalize=True)


class NoMask(Proxy):
    """Rows are padded to the longest of their batch, and the padding is encoded with them."""

    def forward(self, tokens: Tokens, rows: Rows) -> Any:
        width = int(tokens.lengths[rows].max())
        columns = {
            name: Ragged.of([[*column[row].tolist(), *[0] * (width - len(column[row]))] for row in rows])
            for name, column in tokens.columns.items()
        }
        every = np.arange(len(rows))
        padded = dataclasses.replace(tokens, lengths=np.full(len(rows), width), lost=0 * every, columns=columns)
        return super().forward(padded, every)


class Permuted(Proxy):
    def forward(self, tokens: Tokens, rows: Rows) -> Any:
        return super().forward(tokens, rows[::-1])


class SeesNeighbours(Proxy):
    def finish(self, output: Any, *, normalize: bool) -> Vectors:
        vectors = super().finish(output, normalize=False)
        return super().finish(torch.from_numpy(0.99 * vectors + 0.01 * vectors.mean(axis=0)), normalize=normalize)


class KnowsItsPlace(Proxy):
    def finish(self, output: Any, *, normalize: bool) -> Vectors:
        vectors = super().finish(output, normalize=normalize).copy()
        vectors[1:, 0] += 0.001
        return vectors


class Flaky(Proxy):
    def forward(self, tokens: Tokens, rows: Rows) -> Any:
        if tokens.lengths[rows].max() > 20:
            raise RuntimeError("the device is not what it was")
        return super().forward(tokens, rows)


class OtherWeight(Proxy):
    """The first word of each text has another weight; the output is one of the heads beside dense vectors."""

    def finish(self, output: Any, *, normalize: bool) -> Any:
        found: Any = super().finish(output, normalize=normalize)
        for cell in found[:, 0] if found.dtype == object else ():
            cell["weight"][:1] += 2e-4
        return found


class FirstTokenToo(Proxy):
    """A text's first token has a vector, too."""

    def finish(self, output: Any, *, normalize: bool) -> Any:
        found: Any = super().finish(output, normalize=normalize)
        if found.dtype == object:
            found[:, 1] = [np.concatenate([cell[:1], cell]) for cell in found[:, 1]]
        return found


BEHAVIOURS: list[tuple[type[Proxy], str, Precision, set[str]]] = [
    (NoPrompt, "bert", "fp32", {"in batches", "prompt, raw"}),
    (WrongPrompt, "MiniLM", "int8", {"prompt, raw"}),
    (NeverNormalised, "bert", "int8", {"in batches"}),
    (AlwaysNormalised, "bert", "int8", {"prompt, raw"}),
    (NoMask, "MiniLM", "int8", {"beside a longer text"}),
    (NoMask, "bert", "fp32", {"in batches", "beside a longer text"}),
    (Permuted, "bert", "fp32", {"in batches", "prompt, raw", "in another order"}),
    (SeesNeighbours, "bert", "fp32", {"in batches", "beside a longer text"}),
    (KnowsItsPlace, "MiniLM", "fp32", {"in batches"}),
    (Flaky, "bert", "int8", {"in batches"}),
    (OtherWeight, "three heads", "fp32", {"sparse, in batches", "sparse, prompt, raw", "sparse, alone"}),
    (FirstTokenToo, "three heads", "fp32", {"multi, in batches", "multi, prompt, raw", "multi, alone"}),
]


@pytest.mark.parametrize(
    ("kind", "model", "precision", "where"),
    [case(*each, model=each[1], name=f"{each[0].__name__} ({each[1]}, {each[2]})") for each in BEHAVIOURS],
)
def test_a_backend_that_does_not_do_as_the_model_does_fails(
    backend_of: BackendOf, host: Host, kind: type[Proxy], model: str, precision: Precision, where: set[str]
) -> None:
    good: Any = backend_of(model)
    report = examine(kind(good), host, precision)  # type: ignore[arg-type]  # it has all that the gate uses
    assert where <= failed(report), report
