"""What sentence-transformers made of a model is kept for the next start: the same vectors, without loading it again."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from embedctl_config.hardware import ModelEntry
from embedctl_config.outputs import PLAIN, Output
from embedctl_workers.arrays.tokens import Vectors
from embedctl_workers.backends import load_backend
from embedctl_workers.backends.base import Backend
from embedctl_workers.backends.torch import kept, loading
from embedctl_workers.backends.torch.backend import TorchBackend
from embedctl_workers.backends.torch.kept import keep_model, kept_model
from embedctl_workers.backends.torch.packed.packable import packable
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.machine.host import Host
from embedctl_workers.models import references
from embedctl_workers.models.files import resolve_model
from embedctl_workers.models.gate_texts import PROMPT
from embedctl_workers.models.gate_texts import TEXTS as GATE_TEXTS
from embedctl_workers.models.references import references_path
from tests.support.chunks import BUDGET, chunk_of, encode
from tests.support.model_families import edit, edit_weights
from tests.support.other_outputs import make_multi, make_sparse
from tests.support.references_here import sentence_transformer
from tests.support.texts import TEXTS
from tests.support.tiny_models import Tiny, make_model

pytestmark = pytest.mark.slow

ALL_MODES = "cls+mean+max+mean_sqrt_len_tokens+weightedmean+lasttoken"
KEPT = [
    Tiny("bert", pooling=ALL_MODES, dense=12, normalize=True, prompt="passage: "),
    Tiny("roberta", pooling="cls", normalize=True, act="relu"),
    Tiny("xlm-roberta", pooling="mean", truncation="left"),
    Tiny("distilbert", pooling="max", lower=True, act="silu"),
]
NOT_KEPT = [Tiny("bert", include_prompt=False, prompt="passage: "), Tiny("bert", act="gelu_new"), Tiny("mpnet")]


@pytest.fixture
def load(tmp_path: Path) -> Callable[[], Backend]:
    """Loads the model of the test's folder; AMX's products, where they are the fastest, are not as close."""
    host, entry = Host(threads=1, cache=tmp_path / "cache"), ModelEntry(source=str(tmp_path / "model"))
    return lambda: load_backend("torch", "tiny", entry=entry, host=host, options={"products": "plain"})


@pytest.fixture
def refuse_to_load(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, nothing is loaded by sentence-transformers."""

    def refused(_files: object) -> NoReturn:
        raise AssertionError("sentence-transformers was asked")

    return lambda: monkeypatch.setattr(loading, "load_sentence_transformer", refused)


def vectors_of(backend: Backend) -> Vectors:
    found = encode(backend, TEXTS, normalize=False).vectors
    return np.asarray(found)


@pytest.mark.parametrize("tiny", KEPT, ids=str)
def test_the_next_start_gives_the_same_vectors_without_sentence_transformers(
    tiny: Tiny, tmp_path: Path, load: Callable[[], Backend], refuse_to_load: Callable[[], None]
) -> None:
    folder = make_model(tmp_path / "model", tiny)
    first = load()
    expected = vectors_of(first)
    refuse_to_load()
    again = load()
    assert np.array_equal(vectors_of(again), expected)
    assert (again.dim, again.max_tokens, again.engine) == (first.dim, first.max_tokens, first.engine)
    theirs = sentence_transformer(folder).encode(list(TEXTS), batch_size=8)
    np.testing.assert_allclose(expected, theirs, rtol=0, atol=1e-5)


_WITHOUT_TORCH = """
import sys
from pathlib import Path
from embedctl_workers.backends import load_backend
from embedctl_workers.machine.host import Host
backend, model, cache, *options = sys.argv[1:]
host = Host(threads=1, cache=Path(cache))
load_backend(backend, model, entry=None, host=host, options=dict([options]) if options else {}).warm_up()
print(sorted({*sys.modules} & {"torch", "transformers", "sentence_transformers"}))
"""


def imported(*arguments: str) -> str:
    """Which of the three are, by a process that loads a model and warms it up."""
    command = [sys.executable, "-c", _WITHOUT_TORCH, *arguments]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()


@pytest.mark.needs("compiler")
@pytest.mark.needs("avx2")
@pytest.mark.parametrize("backend", ["torch", "int8"])
def test_a_kept_model_encodes_without_an_import_of_torch(backend: str, tmp_path: Path) -> None:
    """Its products are not chosen by torch either: with AVX2, there is one kind."""
    assert imported(backend, "all-MiniLM-L6-v2", str(tmp_path / "cache")) == "[]"


@pytest.mark.needs("compiler")
@pytest.mark.needs("bf16")
def test_so_does_one_in_bf16_whose_products_are_ours(tmp_path: Path) -> None:
    arguments = "torch-bf16", "all-MiniLM-L6-v2", str(tmp_path)
    imported(*arguments)
    (chosen,) = (tmp_path / "fastest").iterdir()
    ours = min(json.loads(chosen.read_text()), key=lambda name: "oneDNN" in name)
    chosen.write_text(json.dumps({ours: 1.0}))
    assert imported(*arguments) == "[]"


@pytest.mark.parametrize(
    ("make", "family"),
    [
        (make_sparse, "bert"),
        (make_sparse, "distilbert"),
        (make_sparse, "xlm-roberta"),
        (make_multi, "bert"),
    ],
)
def test_so_do_models_of_other_outputs(
    make: Callable[[Path, Tiny], Path], family: Any, tmp_path: Path, load: Callable[[], Backend]
) -> None:
    make(tmp_path, Tiny(family))
    first, again = load(), load()
    assert not hasattr(again, "_model")
    for prompt in ("document", "query"):
        found, same = (cells(backend, prompt) for backend in (first, again))
        assert all(map(np.array_equal, found, same))
    arguments = "torch", str(tmp_path / "model"), str(tmp_path / "cache"), "products", "plain"
    assert imported(*arguments) == "['torch']"  # for these products


def cells(backend: Backend, prompt: str) -> list[Any]:
    encoder = ChunkEncoder(backend, BUDGET, prompts={"query": "w1 ", "document": "", **backend.own_prompts})
    options = {"vectors": list(backend.outputs), "prompt_name": prompt}
    return list(encoder.encode(encoder.prepare(chunk_of(*TEXTS), options)).vectors.ravel())


@pytest.mark.parametrize("tiny", NOT_KEPT, ids=str)
def test_what_ours_does_not_do_is_loaded_each_time(tiny: Tiny, tmp_path: Path, load: Callable[[], Backend]) -> None:
    folder = make_model(tmp_path / "model", tiny)
    for _ in range(2):
        theirs = sentence_transformer(folder).encode(list(TEXTS), batch_size=8)
        np.testing.assert_allclose(vectors_of(load()), theirs, rtol=0, atol=1e-5)
    assert not list((tmp_path / "cache").glob("loaded/*"))


def test_other_files_or_a_damaged_or_foreign_record_are_made_again(
    tmp_path: Path, load: Callable[[], Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path / "model", Tiny())
    expected = vectors_of(load())
    (record,) = (tmp_path / "cache" / "loaded").iterdir()
    whole = record.read_bytes()
    for damaged in (b"", whole[:100], b"[]", b"{}", json.dumps({**json.loads(whole), "layers": [{}]}).encode()):
        record.write_bytes(damaged)
        assert np.array_equal(vectors_of(load()), expected)
        assert record.read_bytes() == whole
    record.write_bytes(json.dumps({**json.loads(whole), "rest": [{"modes": ["cls"]}]}).encode())
    record.chmod(0o666)  # anybody could have changed it
    assert np.array_equal(vectors_of(load()), expected)
    edit(folder, "config_sentence_transformers.json", truncate_dim=20)
    assert np.array_equal(vectors_of(load()), expected[:, :20])
    monkeypatch.setattr(kept, "version", lambda _package: "another")
    assert np.array_equal(vectors_of(load()), expected[:, :20])
    assert len(list(record.parent.iterdir())) == 3


def test_files_that_sentence_transformers_reads_otherwise_are_not_kept(
    tmp_path: Path, load: Callable[[], Backend]
) -> None:
    """Old files name weights otherwise; what was kept would find none of them."""
    folder = make_model(tmp_path / "model", Tiny())
    expected = vectors_of(load())
    edit_weights(
        folder, lambda all_: {name.replace("LayerNorm.weight", "LayerNorm.gamma"): each for name, each in all_.items()}
    )
    assert np.array_equal(vectors_of(load()), expected)
    assert len(list((tmp_path / "cache" / "loaded").iterdir())) == 1


def test_what_is_shipped_is_what_sentence_transformers_makes_of_the_model(tmp_path: Path) -> None:
    """After a change of a format or of the texts: `embedctl model verify` makes both files in its cache."""
    files, cache = resolve_model("all-MiniLM-L6-v2"), tmp_path / "cache"
    host = Host(threads=1, cache=cache)
    made = references._load(references_path(files, host), PLAIN)
    assert made is not None, "there is no shipped file of this name"
    theirs = sentence_transformer(files.folder)
    for prompt, vectors in zip((None, PROMPT), made[Output.DENSE], strict=True):
        expected = theirs.encode(list(GATE_TEXTS.values()), prompt=prompt, batch_size=1)
        np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-6)
    shipped = kept_model(files, host)
    assert shipped is not None
    model = TorchBackend(files, host, engine="padded")
    packed = packable(model._model)
    assert packed is not None
    rules = replace(shipped.rules, tokenizer=model._tokenizer.backend_tokenizer.to_str())
    same = keep_model(files, host, model._model, rules, packed)
    assert same is not None
    (record,) = (cache / "loaded").iterdir()
    (of_ours,) = Path(kept.__file__).parents[2].glob("models/known/*.json")
    assert json.loads(record.read_text()) == json.loads(of_ours.read_text())
