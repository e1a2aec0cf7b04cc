"""`model pull` against a hub on loopback: what is downloaded, what is checked, and what is said."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants, snapshot_download

from embedctl_config.errors import HubUnavailable, ModelError, ModelNotFound, SettingsError
from embedctl_config.hardware import ModelEntry
from embedctl_config.settings import Settings
from embedctl_workers.models.files import resolve_model
from embedctl_workers.models.pulling.progress import Progress
from embedctl_workers.models.pulling.pull import Pulled, pull
from embedctl_workers.models.pulling.snapshot import Snapshots
from tests.support.hub import TOKEN, StandInHub, stand_in_hub

NAME = "someone/a-model"
WEIGHTS = random.Random(0).randbytes(400_000)


def module(kind: str, path: str) -> dict[str, str]:
    return {"name": path, "path": path, "type": f"sentence_transformers.models.{kind}"}


MODULES = json.dumps([module("Transformer", ""), module("Pooling", "1_Pooling"), module("Dense", "2_Dense")]).encode()
NEEDED: dict[str, bytes] = {
    "modules.json": MODULES,
    "config.json": b'{"hidden_size": 4}',
    "config_sentence_transformers.json": b'{"prompts": {}}',
    "sentence_bert_config.json": b'{"max_seq_length": 256}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{ }",
    "README.md": b"about",
    "vocab.txt": b"a\nb\n",
    "model.safetensors": WEIGHTS,
    "1_Pooling/config.json": b'{"pooling_mode_mean_tokens": true}',
    "2_Dense/config.json": b'{"in_features": 4}',
    "2_Dense/model.safetensors": WEIGHTS[:1000],
}
OTHERS = {
    ".gitattributes": b"*.bin",
    "pytorch_model.bin": b"a pickle",
    "model.fp16.safetensors": b"halves",
    "2_Dense/pytorch_model.bin": b"a pickle",
    "onnx/model.onnx": b"a graph",
    "onnx/config.json": b"{}",
    "tf_model.h5": b"other weights",
    "modeling_evil.py": b"raise SystemExit('code of the model ran')",
}
FILES = {**OTHERS, **NEEDED}


#: The client makes it of its endpoint as it is imported.
_PATHS = "/{repo_id}/resolve/{revision}/{filename}"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    with stand_in_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + _PATHS)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        hub.put(NAME, FILES)
        yield hub


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses before another try, which are not waited for."""
    pauses: list[float] = []
    monkeypatch.setattr("embedctl_config.retry.time", SimpleNamespace(sleep=pauses.append))
    return pauses


class Said(list[str]):
    @property
    def progress(self) -> Progress:
        return Progress(self.append)


def pulled(**options: Any) -> tuple[Pulled, Said]:
    said = Said()
    return pull(NAME, options.pop("settings", Settings()), said.progress, **options), said


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_another_program_left_incomplete_is_completed(hub: StandInHub) -> None:
    snapshot_download(NAME, allow_patterns=["README.md", "config.json"], endpoint=hub.url)
    with pytest.raises(ModelNotFound, match=f"embedctl model pull {NAME}"):
        resolve_model(NAME)
    found, _ = pulled(if_missing=True)
    assert files_in(found.folder) == NEEDED
    assert resolve_model(NAME).folder == found.folder
    assert "config.json" not in hub.downloads()[2:]


def test_a_damaged_file_is_downloaded_again(hub: StandInHub) -> None:
    first, _ = pulled()
    (first.folder / "model.safetensors").resolve().write_bytes(b"damaged")
    second, said = pulled()
    assert files_in(second.folder) == NEEDED
    assert "model.safetensors on this machine is damaged: it is downloaded again" in said
    assert second.downloaded == len(WEIGHTS)


def test_a_pull_that_gave_up_is_resumed(hub: StandInHub, pauses: list[float]) -> None:
    hub.cuts = [1000, 250_000, 0, 0, 0, 0, 0]
    with pytest.raises(HubUnavailable) as raised:
        pulled()
    assert "the connection to 127.0.0.1" in str(raised.value)
    assert "\n" not in str(raised.value)
    with pytest.raises(ModelNotFound):
        resolve_model(NAME)
    hub.asked.clear()
    found, said = pulled()
    assert files_in(found.folder) == NEEDED
    assert "and 0.2 MB of it is there from an earlier try" in said[0]
    assert found.downloaded < len(WEIGHTS) - 200_000
    assert not list((found.folder.parents[1] / "blobs").glob("*.incomplete"))


def test_a_wrong_hash_is_refused_and_nothing_of_it_kept(hub: StandInHub) -> None:
    for name in ("model.safetensors", "vocab.txt"):
        hub.wrong = {name}
        with pytest.raises(ModelError, match=f"{name} of {NAME}: what came has the hash.*nothing of it is kept"):
            pulled()
        with pytest.raises(ModelNotFound):
            resolve_model(NAME)
        shutil.rmtree(constants.HF_HUB_CACHE)


@pytest.mark.parametrize("step", ["accept", "_link", "link", "note"])
@pytest.mark.parametrize("after", [0, 3])
def test_a_pull_may_die_at_any_step(hub: StandInHub, monkeypatch: pytest.MonkeyPatch, step: str, after: int) -> None:
    plain, calls = getattr(Snapshots, step), []

    def dying(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) > after:
            raise KeyboardInterrupt
        return plain(*arguments)

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(Snapshots, step, dying)
        pulled()
        assert len(calls) <= after, "it did not die"
        return
    with pytest.raises(ModelNotFound):
        resolve_model(NAME)
    # Nor does a commit whose files are not all there.
    snapshots = Path(constants.HF_HUB_CACHE, "models--someone--a-model", "snapshots")
    assert [files_in(each) for each in snapshots.glob("*")] in ([], [NEEDED])
    asked = len(hub.downloads())
    found, _ = pulled()
    assert files_in(found.folder) == NEEDED
    assert len(hub.downloads()) - asked <= (len(NEEDED) if step == "accept" else 0)


def test_a_part_of_something_else_is_not_resumed(hub: StandInHub, pauses: list[float]) -> None:
    hub.cuts = [1000, 250_000, 0, 0, 0, 0, 0]
    with pytest.raises(HubUnavailable):
        pulled()
    (part,) = Path(constants.HF_HUB_CACHE).glob("models--*/blobs/*.incomplete")
    for damage in (b"something else", bytes(500_000)):
        part.write_bytes(damage)
        found, _ = pulled()
        assert files_in(found.folder) == NEEDED
        (found.folder / "model.safetensors").resolve().unlink()


def test_a_branch_that_moved_is_said(hub: StandInHub) -> None:
    first, _ = pulled()
    hub.put(NAME, {**FILES, "README.md": b"more about it"})
    second, said = pulled()
    assert f"main of {NAME} moved from {first.commit[:12]} to {second.commit[:12]}: the same vectors" in said
    assert second.fingerprint == first.fingerprint
    hub.put(NAME, {**FILES, "model.safetensors": WEIGHTS[::-1]})
    third, said = pulled()
    assert f"main of {NAME} moved from {second.commit[:12]} to {third.commit[:12]}: other vectors" in said
    assert third.fingerprint != second.fingerprint
    assert resolve_model(NAME).fingerprint == third.fingerprint
    assert resolve_model(NAME, ModelEntry(revision=first.commit)).fingerprint == first.fingerprint


def test_a_revision_is_that_of_the_command_or_of_the_settings(hub: StandInHub) -> None:
    hub.put(NAME, {**FILES, "model.safetensors": b"old weights"}, revision="refs/pr/1")
    found, _ = pulled(revision="refs/pr/1")
    assert found.commit == hub.commit(NAME, "refs/pr/1")
    assert resolve_model(NAME, ModelEntry(revision="refs/pr/1")).fingerprint == found.fingerprint
    with pytest.raises(ModelNotFound):
        resolve_model(NAME)
    settings = Settings(models={NAME: ModelEntry(revision="refs/pr/1"), "mine": ModelEntry(source=NAME)})
    assert pulled(settings=settings)[0].commit == found.commit
    assert pull("mine", settings, Said().progress).commit == hub.commit(NAME, "main")
    assert pulled(revision=found.commit)[0].folder == found.folder


def test_a_pinned_fingerprint_holds(hub: StandInHub) -> None:
    right = pulled()[0].fingerprint
    assert pulled(settings=Settings(models={NAME: ModelEntry(fingerprint=right)}))[0].fingerprint == right
    hub.put(NAME, {**FILES, "model.safetensors": WEIGHTS[::-1]})
    with pytest.raises(ModelError, match="pins"):
        pulled(settings=Settings(models={NAME: ModelEntry(fingerprint=right)}))
    assert resolve_model(NAME).fingerprint == right, "main stays what it was"


def test_a_folder_needs_no_hub(hub: StandInHub, tmp_path: Path) -> None:
    for path, data in NEEDED.items():
        (tmp_path / "model" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / path).write_bytes(data)
    entry, said = ModelEntry(str(tmp_path / "model")), Said()
    found = pull("mine", Settings(models={"mine": entry}), said.progress)
    assert found.fingerprint == resolve_model("mine", entry).fingerprint
    assert not hub.asked
    assert "there is nothing to download" in said[0]


def test_pickles_come_only_if_allowed(hub: StandInHub) -> None:
    hub.put(NAME, {name: data for name, data in FILES.items() if not name.endswith(".safetensors")})
    with pytest.raises(ModelError, match="--allow-pickle") as raised:
        pulled()
    assert "2_Dense/pytorch_model.bin, a pickle, which can run code" in str(raised.value)
    assert not [name for name in hub.downloads() if name.endswith(".bin")]
    found, _ = pulled(allow_pickle=True)
    assert {"pytorch_model.bin", "2_Dense/pytorch_model.bin"} < files_in(found.folder).keys()
    hub.put(NAME, FILES)
    found, _ = pulled(allow_pickle=True)
    assert not [name for name in files_in(found.folder) if name.endswith(".bin")], "safetensors come first"


def modules_of(kind: str) -> dict[str, bytes]:
    modules = [{"name": "0", "path": "", "type": kind}, module("Normalize", "1_Normalize")]
    return {"modules.json": json.dumps(modules).encode()}


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (modules_of("sentence_transformers.models.Asym"), r"is asymmetric: its module .*\.Asym runs other"),
        (modules_of("modeling_evil.Evil"), "runs no code that comes with a model"),
        ({"1_Pooling/config.json": b"{"}, r"1_Pooling/config\.json can't be read"),
    ],
)
def test_a_useless_model_is_refused_before_its_weights(hub: StandInHub, files: dict[str, bytes], told: str) -> None:
    hub.put(NAME, {**FILES, **files})
    with pytest.raises(ModelError, match=told) as raised:
        pulled()
    assert "\n" not in str(raised.value)
    assert not any(name.endswith(".safetensors") for name in hub.downloads())


CHECKED = {"size": 1, "blobId": "0" * 40}


@pytest.mark.parametrize(
    "listed",
    [
        *({"rfilename": name, **CHECKED} for name in ("../../../etc/passwd", "/etc/passwd", "1_Pooling/../../x.json")),
        *({"rfilename": name, **CHECKED} for name in ("a//b.json", "./a.json", "a\\..\\b", "a\nb", "")),
        {**CHECKED, "blobId": "../../../../x"},
        {**CHECKED, "size": -1},
        {**CHECKED, "size": None},
        {**CHECKED, "blobId": None},
        {**CHECKED, "lfs": {"size": 1, "sha256": "../x", "pointerSize": 1}},
    ],
)
def test_a_file_that_leads_elsewhere_or_has_no_hash_is_refused(hub: StandInHub, listed: dict[str, Any]) -> None:
    hub.extra = [{"rfilename": "vocab.json", **listed}]
    with pytest.raises(ModelError, match="nothing is downloaded"):
        pulled()
    assert not hub.downloads()
    assert not Path(constants.HF_HUB_CACHE, "models--someone--a-model", "snapshots").exists()


@pytest.mark.parametrize("revision", ["../../x", "a/../b", "/x", "a b", "a/./b", ".."])
def test_a_revision_is_no_path(hub: StandInHub, revision: str) -> None:
    with pytest.raises(SettingsError, match="is no branch, tag or commit"):
        pulled(revision=revision)
    assert not hub.asked


def test_a_full_disk_is_said_before_anything_comes(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=300_000))
    with pytest.raises(ModelError, match=r"needs 0\.4 MB more in .*, and 0\.3 MB are free: .*HF_HUB_CACHE"):
        pulled()
    assert "model.safetensors" not in hub.downloads()


def test_a_disk_that_fills_is_one_line(hub: StandInHub, monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> None:
    def full(self: Path, mode: str = "r", *args: Any, **more: Any) -> Any:
        if mode == "ab" and self.stat().st_size > 100_000:
            raise OSError(28, "No space left on device")
        return opened(self, mode, *args, **more)

    opened = Path.open
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        hub.cuts = [1000, 200_000]
        with pytest.raises(ModelError, match=r"can't be written to .*No space left on device"):
            pulled()
    hub.cuts = []
    assert files_in(pulled()[0].folder) == NEEDED


def test_a_hub_that_asks_for_a_pause_gets_it(hub: StandInHub, pauses: list[float]) -> None:
    hub.refusals = [(429, {"Retry-After": "7"}), (503, {})]
    found, said = pulled()
    assert files_in(found.folder) == NEEDED
    assert pauses == [7, 2]
    assert "answers 429 and asks for a pause of 7 s: trying again in 7 s" in said[0]
    hub.refusals = [(429, {"Retry-After": "86400"})]
    with pytest.raises(HubUnavailable, match="answers 429 and asks for a pause of 86400 s"):
        pulled()
    assert pauses == [7, 2], "so long a pause is not waited for"


@pytest.mark.parametrize(
    ("what", "error", "said"),
    [
        ({"models": {}}, ModelNotFound, "shows no model 'someone/a-model': correct the name, or set HF_TOKEN"),
        ({"private": {NAME}}, ModelNotFound, "shows no model 'someone/a-model': correct the name, or set HF_TOKEN"),
        ({"gated": {NAME}}, ModelError, "asks for consent: give it on the model's page, and set HF_TOKEN"),
        ({"refusals": [(500, {})] * 20}, HubUnavailable, "answers 500. Or pull it on a machine with a network"),
        ({"refusals": [(400, {})] * 20}, ModelError, "answers 400 for someone/a-model"),
        ({"refusals": [(200, {})] * 20}, ModelError, "does not answer as a hub does: is HF_ENDPOINT right?"),
    ],
)
def test_what_the_hub_refuses_is_one_line_that_names_the_mend(
    hub: StandInHub, pauses: list[float], what: dict[str, Any], error: type[ModelError], said: str
) -> None:
    vars(hub).update(what)
    with pytest.raises(error) as raised:
        pulled()
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_token_goes_to_the_hub_alone_and_into_no_log(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, pauses: list[float]
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.private.add(NAME)
    hub.cuts = [1000, 100_000]
    with caplog.at_level(logging.DEBUG):
        found, said = pulled()
    assert files_in(found.folder) == NEEDED
    to_hub = [each for each in hub.asked if each.server == "hub"]
    assert all(each.headers["authorization"] == f"Bearer {TOKEN}" for each in to_hub)
    to_store = [each for each in hub.asked if each.server == "store"]
    assert len(to_store) == 3
    assert not any(TOKEN in value for each in to_store for value in (each.path, *each.headers.values()))
    everything = "\n".join([*said, caplog.text])
    assert TOKEN not in everything
    assert all(
        TOKEN.encode() not in path.read_bytes() for path in Path(constants.HF_HUB_CACHE).rglob("*") if path.is_file()
    )


def test_without_a_network_the_message_is_one_line_that_names_the_mend(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch, free_port: int, pauses: list[float]
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"http://someone:secret@127.0.0.1:{free_port}")
    with pytest.raises(HubUnavailable) as raised:
        pulled()
    message = str(raised.value)
    assert "\n" not in message
    assert "secret" not in message
    assert f"the connection to 127.0.0.1:{free_port} failed (ConnectError)" in message
    assert "copy the folder models--someone--a-model from there to" in message


def test_a_copied_cache_folder_is_enough(hub: StandInHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found, _ = pulled()
    shutil.copytree(found.folder.parents[1], tmp_path / "copy" / "models--someone--a-model", symlinks=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "copy"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.asked)
    copied, said = pulled()
    assert copied.fingerprint == found.fingerprint
    assert said == [f"HF_HUB_OFFLINE is set: the hub is not asked whether {NAME} has changed"]
    shutil.rmtree(tmp_path / "copy")
    with pytest.raises(HubUnavailable, match=r"HF_HUB_OFFLINE is set, so 127.*: unset it\. Or pull it on a machine"):
        pulled()
    assert len(hub.asked) == asked


def test_where_there_are_no_links_files_are_copied(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(os.strerror(1))

    monkeypatch.setattr(Path, "symlink_to", refuse)
    found, _ = pulled()
    assert files_in(found.folder) == NEEDED
    assert not (found.folder / "model.safetensors").is_symlink()
    assert pulled()[0].downloaded == 0
