"""Where models come from, and what their fingerprint covers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from embedctl_config.errors import ModelError, ModelNotFound
from embedctl_config.fingerprint import job_fingerprint
from embedctl_config.hardware import ModelEntry
from embedctl_workers.models.facts import is_matryoshka, pooling_of
from embedctl_workers.models.files import ModelFiles, fingerprint_of, resolve_model

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


#: What decides the vectors.
FILES = {
    "modules.json": json.dumps(MODULES),
    "config.json": '{"hidden_size": 4}',
    "config_sentence_transformers.json": '{"prompts": {}}',
    "sentence_bert_config.json": '{"max_seq_length": 256}',
    "tokenizer.json": "{}",
    "tokenizer_config.json": "{}",
    "vocab.txt": "a\nb\n",
    "model.safetensors": "weights",
    "1_Pooling/config.json": '{"pooling_mode_mean_tokens": true}',
}


def write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "a-model"
    for name, content in (*FILES.items(), ("README.md", "about")):
        write(folder / name, content)
    return folder


@pytest.mark.parametrize("file", FILES)
def test_what_decides_the_vectors_decides_the_fingerprint(model: Path, file: str) -> None:
    before = fingerprint_of(model)
    content = (model / file).read_text()
    write(model / file, content + " ")
    assert fingerprint_of(model) != before
    write(model / file, content)
    assert fingerprint_of(model) == before


@pytest.mark.parametrize(
    "file", ["README.md", "data_config.json", "train_script.py", "onnx/model.onnx", ".gitattributes", "openvino/x.bin"]
)
def test_what_does_not_decide_the_vectors_leaves_the_fingerprint(model: Path, file: str) -> None:
    before = fingerprint_of(model)
    write(model / file, "something else")
    assert fingerprint_of(model) == before


def with_module(kind: object) -> str:
    return json.dumps([*MODULES, {"idx": 3, "name": "3", "path": "", "type": kind}])


ROUTES = {"types": {"0_Transformer": "sentence_transformers.models.Transformer", "1_Evil": "modeling_evil.Evil"}}
WORDS = {"tokenizer_class": "modeling_evil.Evil"}


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        *(
            ("modules.json", with_module(kind), "runs no code that comes with a model")
            for kind in ("modeling_evil.Evil", "sentence_transformers_evil.Evil", "os.system", None, 3)
        ),
        (
            "modules.json",
            with_module("sentence_transformers.models.Router"),
            r"is asymmetric: its module .*\.Router runs",
        ),
        ("1_Pooling/router_config.json", json.dumps(ROUTES), r"modeling_evil\.Evil"),
        ("1_Pooling/config.json", json.dumps(ROUTES), r"modeling_evil\.Evil"),
        ("1_Pooling/wordembedding_config.json", json.dumps(WORDS), r"modeling_evil\.Evil"),
        *(("modules.json", content, r"modules\.json can't be read") for content in ("{", "[{}]", "3")),
    ],
)
def test_what_leads_to_code_is_asymmetric_or_unreadable_is_refused(
    model: Path, file: str, content: str, told: str
) -> None:
    write(model / file, content)
    write(model / "modeling_evil.py", "raise SystemExit('code of the model ran')")
    with pytest.raises(ModelError, match=told):
        resolve_model("mine", ModelEntry(str(model)))


def test_the_pinned_fingerprint_is_the_only_one_served(model: Path) -> None:
    right = fingerprint_of(model)
    assert resolve_model("mine", ModelEntry(str(model), fingerprint=right)).fingerprint == right
    wrong = "0" * 64
    with pytest.raises(ModelError) as raised:
        resolve_model("mine", ModelEntry(str(model), fingerprint=wrong))
    for fact in ("'mine'", str(model), right, wrong, "[models.mine]"):
        assert fact in str(raised.value)


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "no-cache"))


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize(
    ("source", "revision", "command"),
    [
        ("someone/some-model", "", "embedctl model pull someone/some-model"),
        ("someone/some-model", "v2", "embedctl model pull someone/some-model@v2"),
        ("some-model", "", "embedctl model pull sentence-transformers/some-model"),
        ("a/b/c", "", "embedctl model pull a/b/c"),
    ],
)
def test_a_model_that_is_nowhere_says_how_to_get_it(source: str, revision: str, command: str) -> None:
    with pytest.raises(ModelNotFound) as raised:
        resolve_model("mine", ModelEntry(source, revision))
    assert f"get it: {command}, or add --pull to `embedctl run`, `worker` or `up`" in str(raised.value)
    assert raised.value.exit_code == 4


def test_the_jobs_options_join_its_models_fingerprint() -> None:
    options = {"prompt": None, "long": "cut", "normalize": True, "chunk_rows": 512}
    plain = job_fingerprint("ab" * 32, options)
    assert len(bytes.fromhex(plain)) == 32
    assert job_fingerprint("ab" * 32, {**options, "chunk_rows": 3}) == plain
    changes: dict[str, tuple[object, ...]] = {
        "prompt": ("",),
        "prompt_name": ("query", "document"),
        "long": ("cut-left", "error", "mean", "split"),
        "normalize": (False,),
        "dimensions": (64, 65),
    }
    others = [job_fingerprint("ab" * 32, {**options, name: each}) for name, of in changes.items() for each in of]
    assert len({plain, job_fingerprint("cd" * 32, options), *others}) == 12


def test_a_job_without_later_options_keeps_the_fingerprint_that_it_always_had() -> None:
    options = {"prompt": None, "long": "cut", "normalize": True}
    for without in (options, {**options, "dimensions": None}):
        assert job_fingerprint("ab" * 32, without) == "96783a6d51ad3eb4d90683410a12490f06f21f826b7ea9dd7032403c410e6d3a"


def test_a_model_that_is_computed_by_its_author_s_code_is_refused(model: Path) -> None:
    for code, sibling in (
        ("Alibaba-NLP/new-impl--modeling.NewModel", "gte-multilingual-base"),
        ("modeling_qwen.Qwen2Model", "Qwen3-Embedding-0.6B"),
        ("jinaai/jina-bert-implementation--modeling_bert.JinaBertModel", "gte-modernbert-base"),
    ):
        write(model / "config.json", json.dumps({"model_type": "bert", "auto_map": {"AutoModel": code}}))
        with pytest.raises(ModelError, match=f"config.json names '{code}', its author's own code.*{sibling}"):
            fingerprint_of(model)
    others: tuple[object, ...] = ({"AutoModelForMaskedLM": "modeling.Other"}, None, [], "text")
    for harmless in others:
        write(model / "config.json", json.dumps({"model_type": "bert", "auto_map": harmless}))
        assert fingerprint_of(model)


NOMIC = {
    "model_type": "nomic_bert",
    "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
    "n_embd": 768,
    "n_layer": 12,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_scaling_factor": None,
}


def test_nomic_s_files_are_computed_by_transformers_where_it_reads_all_that_they_state(model: Path) -> None:
    for good in (NOMIC, {**NOMIC, "n_layer": 2, "num_hidden_layers": 2}):
        write(model / "config.json", json.dumps(good))
        assert fingerprint_of(model)
    for field, value in (("n_layer", 2), ("rotary_emb_base", 10_000), ("rotary_scaling_factor", 2)):
        write(model / "config.json", json.dumps({**NOMIC, field: value}))
        with pytest.raises(ModelError, match=f"config.json states {field} {value}, which only its author's own code"):
            fingerprint_of(model)


def test_a_transformer_that_reads_no_text_is_refused_with_modules_too(model: Path) -> None:
    for config, medium in (({"image_size": 16}, "images"), ({"conv_dim": [8], "vocab_size": 32}, "sound")):
        write(model / "config.json", json.dumps({"model_type": "other", **config}))
        with pytest.raises(ModelError, match=f"a model for {medium}"):
            resolve_model("mine", ModelEntry(str(model)))
    write(model / "config.json", json.dumps({"model_type": "qwen2_vl", "text_config": {}, "vision_config": {}}))
    assert resolve_model("mine", ModelEntry(str(model)))


@pytest.mark.parametrize("place", ["", "0_Transformer/"])
def test_an_adapter_is_not_a_model(model: Path, place: str) -> None:
    write(model / f"{place}adapter_config.json", '{"base_model_name_or_path": "a/model"}')
    if place:
        write(model / "modules.json", json.dumps([{**MODULES[0], "path": "0_Transformer"}]))
    with pytest.raises(ModelError, match=f"{place}adapter_config.json makes the model an adapter.*merge"):
        fingerprint_of(model)


@pytest.mark.parametrize(
    ("file", "contents", "words"),
    [
        ("config_sentence_transformers.json", {"model_type": "CrossEncoder"}, "a reranker"),
        ("config_sentence_transformers.json", {"model_type": "Later"}, "is no SentenceTransformer"),
        ("config.json", {"architectures": ["XLMRobertaForSequenceClassification"]}, "a reranker"),
        ("config.json", {"architectures": ["T5ForConditionalGeneration"]}, "writes text"),
        ("config.json", {"architectures": ["VisionEncoderDecoderModel"]}, "writes text"),
        ("config.json", {"architectures": ["ColPaliForRetrieval"]}, "is for late interaction: save it with"),
        ("config.json", {"architectures": ["ViTForImageClassification"]}, "is for ImageClassification: transformers"),
        ("config.json", {"architectures": ["CLIPModel"], "text_config": {}, "vision_config": {}}, "reads images"),
    ],
)
def test_a_model_without_vectors_of_texts_is_refused(model: Path, file: str, contents: object, words: str) -> None:
    """With modules, these decide, whatever head the transformer was saved with."""
    write(model / file, json.dumps(contents))
    if file == "config.json":
        fingerprint_of(model)
        (model / "modules.json").unlink()
    with pytest.raises(ModelError, match=f"vectors of texts alone: such a model .*{words}"):
        fingerprint_of(model)


@pytest.mark.parametrize("architecture", ["BertModel", "BertForMaskedLM", "Qwen3ForCausalLM", "GPT2LMHeadModel"])
def test_a_model_that_states_no_pooling_is_served_with_one_that_is_said(model: Path, architecture: str) -> None:
    write(model / "config.json", json.dumps({"architectures": [architecture]}))
    stated = resolve_model("mine", ModelEntry(str(model))).fingerprint
    with pytest.raises(ModelError, match="states its own modules"):
        resolve_model("mine", ModelEntry(str(model), pooling="cls"))
    (model / "modules.json").unlink()
    with pytest.raises(ModelError, match=rf"is a {architecture}, which states no pooling.*--pooling mean\|cls\|last"):
        resolve_model("mine", ModelEntry(str(model)))
    found = [resolve_model("mine", ModelEntry(str(model), pooling=each)) for each in ("mean", "cls", "last")]
    assert [each.pooling for each in found] == ["mean", "cls", "last"]
    assert len({stated, *(each.fingerprint for each in found)}) == 4, "vectors of two poolings can't be compared"


@pytest.mark.parametrize(
    ("kind", "contents", "expected"),
    [
        ("Pooling", {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ("Pooling", {"pooling_mode_cls_token": True, "pooling_mode_lasttoken": True}, "cls+last_token"),
        ("Pooling", {"pooling_mode": "lasttoken"}, "last_token"),
        ("Pooling", {"pooling_mode": ["cls", "max"]}, "cls+max"),
        ("Pooling", {"pooling_mode": 7}, ""),
        ("SpladePooling", {}, "splade"),
        ("Dense", {}, ""),
    ],
)
def test_its_files_say_how_vectors_are_made(model: Path, kind: str, contents: object, expected: str) -> None:
    write(model / "modules.json", json.dumps([{"path": "", "type": "T"}, {"path": "1_P", "type": f"s.{kind}"}]))
    write(model / "1_P" / "config.json", json.dumps(contents))
    assert pooling_of(ModelFiles("m", model, "")) == expected
    (model / "modules.json").unlink()
    assert pooling_of(ModelFiles("m", model, "", pooling="last")) == "last_token"


@pytest.mark.parametrize(
    ("file", "contents", "expected"),
    [
        ("README.md", "---\ntags:\n- bert\n- loss:MatryoshkaLoss\n---\n# A model", True),
        ("README.md", "---\ntags: [bert, matryoshka]\n---\n", True),
        ("README.md", '---\ntags:\n- bert\n---\n```json\n{"matryoshka_dims": [\n 64]}\n```', True),
        ("README.md", "---\nbase_model: a-matryoshka\n---\nNot trained with Matryoshka:\n- matryoshka\n", False),
        ("config.json", '{"matryoshka_dimensions": [64, 128]}', True),
        ("config.json", "{", False),
    ],
)
def test_its_card_or_configuration_says_that_vectors_can_be_cut(
    model: Path, file: str, contents: str, expected: bool
) -> None:
    (model / file).write_text(contents)
    assert is_matryoshka(model) is expected
