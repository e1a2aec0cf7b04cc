"""Traces for AWS Neuron on a fake of its runtime, which runs the same model on the CPU: never the device itself."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from embedctl_config.errors import DeviceLost, MissingExtra, ModelError, SettingsError, WorkerError
from embedctl_config.hardware import SHIPPED_CLASSES, ModelEntry
from embedctl_workers.accuracy.gate import run_gate
from embedctl_workers.arrays.tokens import Vectors
from embedctl_workers.backends import load_backend
from embedctl_workers.backends.neuron import recipe, tracing
from embedctl_workers.backends.neuron.backend import NeuronBackend, Pending
from embedctl_workers.backends.neuron.recipe import TraceOptions, artifact_for, wanted
from embedctl_workers.backends.onnx.export import WholeModel
from embedctl_workers.commands import model
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.machine.host import Host
from embedctl_workers.models.builders import BuildOptions
from tests.support.builds_here import build_here
from tests.support.chunks import encode
from tests.support.neuron_site import fake_machine, fake_site
from tests.support.references_here import by_torch
from tests.support.texts import TEXTS, text_of
from tests.support.tiny_models import FilesOf, Tiny

#: Tracing warns of each test in a model's Python; whether the trace is right is what is tested here.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]

BATCH = 4
BUCKETS = [8, 16, 32]
OPTIONS: dict[str, Any] = {"buckets": "8,16,32", "batch": BATCH}
MODELS = [
    Tiny(),
    Tiny("roberta", pooling="cls", normalize=True, truncation="left"),
    Tiny("mpnet", prompt="passage: ", include_prompt=False, normalize=True),
    Tiny("qwen3", pooling="lasttoken", prompt="passage: "),
]
Load = Callable[..., NeuronBackend]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of packages that holds the fake; its calls are those of this test."""
    fake_site(tmp_path / "site", monkeypatch)
    fake_machine(tmp_path / "machine", monkeypatch)
    return tmp_path / "site"


@pytest.fixture
def calls(site: Path) -> list[dict[str, Any]]:
    import torch_neuronx  # type: ignore[import-not-found]  # the fake, which is here for this test alone

    found: list[dict[str, Any]] = torch_neuronx.CALLS
    return found


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(1, tmp_path / "cache")


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traced")


@pytest.fixture
def traced_here(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_here(monkeypatch)


@pytest.fixture
def load(traced_here: None, files_of: FilesOf, traced: Path) -> Load:
    """Builds without a device, for all tests that name no host of their own, and loads."""

    def load(tiny: Tiny, host: Host | None = None) -> NeuronBackend:
        files, options = files_of(tiny), TraceOptions.parse(OPTIONS)
        host = host or Host(1, traced)
        return NeuronBackend(files, artifact_for(files, host, options, BuildOptions(target="inf2")).folder, host)

    return load


@pytest.fixture
def own(traced_here: None, files_of: FilesOf, traced: Path, host: Host) -> Path:
    """The small model's traces, in a cache of the test's own."""
    options = TraceOptions.parse(OPTIONS)
    folder = artifact_for(files_of(Tiny()), Host(1, traced), options, BuildOptions(target="inf2")).folder
    return Path(shutil.copytree(folder, host.cache / "artifacts" / folder.name))


def close_to(found: Vectors, expected: Vectors, tolerance: float = 1e-5) -> None:
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("tiny", MODELS, ids=str)
def test_vectors_are_those_of_sentence_transformers(tiny: Tiny, load: Load, files_of: FilesOf) -> None:
    backend, folder = load(tiny), files_of(tiny).folder
    texts = [*TEXTS[:20:3], *TEXTS[20:]]
    backend.warm_up()
    for prompt in (None, "query: ", ""):
        close_to(encode(backend, texts, prompt=prompt, normalize=False).vectors, by_torch(folder, texts, prompt=prompt))
    close_to(encode(backend, texts, normalize=True).vectors, by_torch(folder, texts, normalize_embeddings=True))
    backend.close()


def test_a_text_of_any_length_runs_in_the_shortest_bucket_that_holds_it(load: Load, files_of: FilesOf) -> None:
    from transformers import AutoTokenizer

    backend, folder = load(Tiny()), files_of(Tiny()).folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ran = watch(backend)
    lengths = [edge + more for edge in BUCKETS for more in (-1, 0, 1)]
    expected = [next((bucket for bucket in BUCKETS if bucket >= length), BUCKETS[-1]) for length in lengths]
    texts = [text_of(length, tokenizer) for length in lengths]
    for text, reference in zip(texts, by_torch(folder, texts), strict=True):
        close_to(encode(backend, [text], normalize=False).vectors, reference[np.newaxis])
    assert [bucket for bucket, _ in ran] == expected
    assert encode(backend, [text_of(40, tokenizer)]).truncations[0].lost == 8


def watch(backend: NeuronBackend) -> list[tuple[int, torch.Tensor]]:
    """From here on, the bucket and the attention mask of every run."""
    ran: list[tuple[int, torch.Tensor]] = []
    mask = list(backend._traces.inputs).index("attention_mask")

    def watched(bucket: int, module: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*inputs: torch.Tensor) -> torch.Tensor:
            ran.append((bucket, inputs[mask]))
            return module(*inputs)

        return run

    backend._modules = {bucket: watched(bucket, module) for bucket, module in backend._modules.items()}
    return ran


def test_any_number_of_rows_makes_runs_of_one_size(load: Load) -> None:
    backend = load(Tiny())
    expected = np.concatenate([encode(backend, [text], normalize=False).vectors for text in TEXTS])
    ran = watch(backend)
    for count in (1, BATCH - 1, BATCH, BATCH + 1, 2 * BATCH, 5 * BATCH + 2):
        ran.clear()
        close_to(encode(backend, TEXTS[:count], budget=10_000, normalize=False).vectors, expected[:count], 2e-6)
        assert len(ran) == -(-count // BATCH)
        for bucket, mask in ran:
            assert mask.shape == (BATCH, bucket)
            # Neuron fails a whole run for one NaN in it, and a softmax over nothing is one: dummy rows hold tokens too.
            assert (mask.sum(1) > 0).all()


def test_a_model_is_traced_once_for_each_bucket(
    calls: list[dict[str, Any]], load: Load, files_of: FilesOf, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(calls)
    backend = load(Tiny(prompt="passage: ", include_prompt=False), host)
    traced = calls[before:]
    assert [tuple(call["example_inputs"][0].shape) for call in traced] == [(BATCH, bucket) for bucket in BUCKETS]
    for call in traced:
        assert call["cpu_backend"] is True
        assert call["compiler_args"] == [
            *("--model-type", "transformer", "--auto-cast", "matmult", "--auto-cast-type", "bf16", "--target", "inf2")
        ]
        assert {tensor.dtype for tensor in call["example_inputs"]} == {torch.int64}
        *_, attention, pooling = call["example_inputs"]
        # A model may leave out the mask of a batch without padding, and its trace would for ever.
        assert (attention[:, -1] == 0).all()
        assert (attention.sum(1) > 0).all()
        assert (pooling == attention).all()
        assert not Path(call["compiler_workdir"]).exists()
    assert backend._traces.inputs == ["input_ids", "token_type_ids", "attention_mask", "pooling_mask"]
    one = {**OPTIONS, "buckets": "32"}
    artifact_for(files_of(Tiny()), host, TraceOptions.parse({**one, "auto_cast": "none", "target": "trn1"}))
    assert calls[-1]["cpu_backend"] is False
    assert calls[-1]["compiler_args"] == ["--model-type", "transformer", "--auto-cast", "none"]
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    artifact_for(files_of(Tiny()), host, TraceOptions.parse(one), BuildOptions(target="trn2"))
    assert calls[-1]["options"]["--logical-nc-config"] == "1"
    assert calls[-1]["options"]["--target"] == "trn2"


class Unmasked(WholeModel):
    """The mask trap: a trace whose model never looked at the mask."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        named = dict(zip(self._names, inputs, strict=True))
        named["attention_mask"] = torch.ones_like(named["attention_mask"])
        vectors: torch.Tensor = super().forward(*named.values())
        return vectors


class Mixed(WholeModel):
    """A row's vector holds some of its neighbours'."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        vectors: torch.Tensor = super().forward(*inputs)
        return vectors + 0.3 * vectors.mean(0, keepdim=True)


@pytest.mark.parametrize("wrong", [Unmasked, Mixed])
def test_a_trace_that_lets_padding_or_neighbours_in_is_refused_at_start(
    wrong: type[WholeModel], load: Load, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "WholeModel", wrong)
    with pytest.raises(ModelError, match="'tiny': padding shows in its vectors on Neuron"):
        load(Tiny(), host).warm_up()


def fail(backend: NeuronBackend, message: str) -> None:
    def module(*inputs: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(message)

    backend._modules[BUCKETS[0]] = module


def test_errors_come_up_when_a_batch_is_finished(load: Load) -> None:
    backend = load(Tiny())
    tokens = backend.tokenize(["a", "the text"], "")
    fail(backend, 'nrt_execute status=1003 message="Execution completed with numerical errors"')
    pending = backend.forward(tokens, np.arange(2))
    with pytest.raises(RuntimeError, match="status=1003"):
        backend.finish(pending, normalize=True)
    fail(backend, 'nrt_execute status=101 message="Encountered fatal error, Execution Unit cannot recover"')
    pending = backend.forward(tokens, np.arange(2))
    with pytest.raises(DeviceLost, match=r"NRT_EXEC_UNIT_UNRECOVERABLE \(101\)") as lost:
        backend.finish(pending, normalize=True)
    assert lost.value.exit_code == 71


def test_a_batch_that_failed_leaves_nothing_running(load: Load) -> None:
    backend = load(Tiny())
    done: Future[Vectors] = Future()
    done.set_exception(RuntimeError("the first"))
    slow: Future[Vectors] = Future()
    threading.Timer(0.3, slow.set_result, [np.zeros((1, backend.dim), np.float32)]).start()
    tokens = backend.tokenize(["a", "the text"], "")
    runs = backend.forward(tokens, np.arange(2)).runs
    with pytest.raises(RuntimeError, match="the first"):
        backend.finish(Pending(2, [*runs, *runs], [done, slow]), normalize=True)
    assert slow.done()


def test_every_component_is_in_the_key(files_of: FilesOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, options = files_of(Tiny()), TraceOptions()
    versions = {"torch-neuronx": "2.9.0.2.13", "neuronx-cc": "2.20.1"}
    monkeypatch.setattr(recipe, "version_of", lambda package: versions[package])
    changes = ({"buckets": "64,512"}, {"batch": 8}, {"auto_cast": "none"})
    names = [wanted(files, options, target).name for target in ("inf2", "trn1")]
    names.append(wanted(replace(files, fingerprint="cd" * 32), options, "inf2").name)
    names += [wanted(files, TraceOptions.parse(changed), "inf2").name for changed in changes]
    for package in versions:
        with monkeypatch.context() as patch:
            patch.setitem(versions, package, "2.99")
            names.append(wanted(files, options, "inf2").name)
    for cores in ("1", "2"):
        monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", cores)
        names.append(wanted(files, options, "trn2").name)
    assert len(set(names)) == len(names)
    assert wanted(files, TraceOptions(target="trn1"), "inf2").name == names[0]


def test_a_device_is_needed_to_run_and_not_to_build_for_another(
    load: Load, files_of: FilesOf, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "machine" / "dev" / "neuron0").unlink()
    monkeypatch.setenv("FAKE_NEURON_DEVICES", "0")
    load(Tiny(), host)
    entry = ModelEntry(str(files_of(Tiny()).folder))
    with pytest.raises(WorkerError, match="there is no Neuron device here"):
        load_backend("neuron", "tiny", entry=entry, host=host, options=OPTIONS)


def test_what_is_not_there_is_refused(
    files_of: FilesOf, host: Host, site: Path, traced_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = files_of(Tiny())
    with pytest.raises(ModelError, match=r"no artefact \w+-neuron-\w+ in .* --no-build"):
        recipe.build(files, replace(host, build=False), BuildOptions(target="inf2"))
    with pytest.raises(SettingsError, match="leave --exporter optimum out"):
        recipe.build(files, host, BuildOptions(exporter="optimum", target="inf2"))
    with pytest.raises(SettingsError, match="ends at 16 tokens, and the model takes 32"):
        recipe.build(files, host, BuildOptions({"buckets": "8,16"}, target="inf2"))
    import torch_neuronx

    with monkeypatch.context() as patch:
        patch.setattr(torch_neuronx, "trace", lambda func, example_inputs, *, compiler_args=None: None)
        with pytest.raises(WorkerError, match="can't trace without a device: use a newer one"):
            recipe.build(files, host, BuildOptions(target="neuron"))
    monkeypatch.setattr(recipe, "version_of", lambda package: "")
    with pytest.raises(MissingExtra, match="backend 'neuron' needs"):
        recipe.build(files, host, BuildOptions(target="inf2"))


def test_a_trace_that_the_device_does_not_take_is_said_in_one_line(own: Path, host: Host, files_of: FilesOf) -> None:
    (own / "bucket-16.pt").write_bytes(b"no trace")
    with pytest.raises(WorkerError, match=r"bucket-16\.pt of model 'tiny' can't be put on the Neuron core") as refused:
        NeuronBackend(files_of(Tiny()), own, host)
    assert "\n" not in str(refused.value)


def test_the_manifest_says_what_was_built(traced_here: None, files_of: FilesOf, host: Host) -> None:
    files = files_of(Tiny(max_seq_length=64))
    artifact = artifact_for(files, host, TraceOptions.parse({"batch": BATCH}), BuildOptions(revision="main"))
    manifest = artifact.manifest
    assert set(manifest["files"]) == {"model.json", "tokenizer.json", "traces.json", "bucket-32.pt", "bucket-64.pt"}
    assert manifest["graph"] == {"name": "traces", "buckets": [32, 64], "batch": BATCH, "target": "inf2"}
    assert manifest["model"]["revision"] == "main"
    assert {"torch", "sentence-transformers", "torch-neuronx", "neuronx-cc"} <= set(manifest["versions"])
    # A worker on such a machine finds what was built, and holds it to the gate.
    backend = NeuronBackend.load("tiny", ModelEntry(str(files.folder)), host, {"batch": BATCH})
    assert backend.engine == manifest["engine"]
    assert run_gate(ChunkEncoder(backend, backend.token_budget), SHIPPED_CLASSES["neuron"], host) is not None


def test_one_command_builds(site: Path, files_of: FilesOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "embedctl.toml").write_text(
        f'[models.tiny]\nsource = "{files_of(Tiny()).folder}"\n[classes.neuron.options]\nbuckets = "16,32"\nbatch = 2\n'
    )
    monkeypatch.setenv("EMBEDCTL_CONFIG", str(tmp_path / "embedctl.toml"))
    monkeypatch.setenv("EMBEDCTL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FAKE_NEURON_DEVICES", "0")

    def build(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "embedctl_workers.commands.model", "build", "tiny", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    built = build("--target", "neuron", "--json")
    assert built.returncode == 0, built.stderr
    facts = json.loads(built.stdout)
    assert facts["recipe"]["target"] == "inf2"
    assert build("--target", "inf2").stdout.strip() == facts["folder"]
    shown = CliRunner().invoke(model.main, ["show", "tiny"]).stdout
    assert '"target": "inf2"' in shown
    refused = build("--class", "neuron")
    assert refused.returncode == 2
    assert "class neuron needs a Neuron core, and none is found here" in refused.stderr
    assert refused.stderr.endswith("; --target builds without one\n")


@pytest.mark.needs("neuron")
def test_the_real_thing(tmp_path: Path, files_of: FilesOf) -> None:
    host = Host(2, tmp_path)
    entry = ModelEntry(str(files_of(Tiny()).folder))
    backend = load_backend("neuron", "tiny", entry=entry, host=host, options={"batch": BATCH})
    try:
        backend.warm_up()
        assert run_gate(ChunkEncoder(backend, backend.token_budget), SHIPPED_CLASSES["neuron"], host) is not None
    finally:
        backend.close()
