"""The gateway with clients of other projects, each as a program of its own that prints what it got as JSON.

`tests/support/get-clients.sh` installs those that the environment of the tests does not have. A test is skipped where
its client is missing.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from embedctl_config.settings import Settings
from tests.support.batches import client_of
from tests.support.gateway import Running, gateway_with_keys, running_gateway
from tests.support.jobs import reference
from tests.support.workers import StartWorker

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / "build" / "clients"
PAGE = (ROOT / "docs" / "gateway.md").read_text(encoding="utf-8")
TEXTS = ["one", "two words", "three words here"]
#: Generous: frameworks take long to import (seconds).
TIMEOUT_S = 150

Run = Callable[..., Any]


@pytest.fixture
def gateway(settings: Settings, start_worker: StartWorker) -> Iterator[Running]:
    start_worker()
    with running_gateway(settings) as running:
        yield running


@pytest.fixture
def run(gateway: Running, short_folder: Path) -> Run:
    """Runs a program with the gateway's address as its argument, and returns what it printed."""

    def run(program: str | Path, file: str, source: str) -> Any:
        (short_folder / file).write_text(source)
        done = subprocess.run(
            [program, file, gateway.url],
            cwd=short_folder,
            env={"PATH": "/usr/bin:/bin", "HOME": str(short_folder)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    return run


def installed(name: str, program: str) -> Path:
    """A program of a client's environment; if it is not there, the test is skipped."""
    if not (CLIENTS / name / "complete").exists():
        pytest.skip("tests/support/get-clients.sh has not installed it")
    return CLIENTS / name / program


def example(language: str, word: str) -> str:
    """The example of the page in a language that has a word, for the test's model."""
    found: list[str] = re.findall(rf"```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    source = next(each for each in found if word in each)
    assert "http://127.0.0.1:8080" in source
    return source.replace("all-MiniLM-L6-v2", "dummy")


@pytest.mark.client("openai", "errors are those of the client: their classes, codes and fields")
def test_errors_of_the_official_client(settings: Settings, start_worker: StartWorker, short_folder: Path) -> None:
    start_worker()
    with (
        gateway_with_keys(settings, short_folder, "search") as (gateway, (key,)),
        client_of(gateway, key, retries=2) as client,
    ):
        with pytest.raises(openai.NotFoundError) as unknown:
            client.embeddings.create(input="one", model="dumy")
        with pytest.raises(openai.BadRequestError) as ids:
            client.embeddings.create(input=[[101, 102]], model="dummy")
        with pytest.raises(openai.AuthenticationError) as stranger:
            client.with_options(api_key="wrong").models.list()
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    assert (ids.value.code, ids.value.type) == ("invalid_type", "invalid_request_error")
    assert "check_embedding_ctx_length=False" in ids.value.message
    assert stranger.value.code == "invalid_api_key"
    assert all(each.value.request_id for each in (unknown, ids, stranger))


FIRST = """
import json, sys
client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
texts = TEXTS
default, floats = (
    client.embeddings.create(input=texts, model="dummy", **more) for more in ({}, {"encoding_format": "float"})
)
try:
    client.embeddings.create(input="one", model="dumy")
except openai.NotFoundError as error:
    status = error.status_code
print(json.dumps({
    "models": [each.id for each in client.models.list()],
    "vectors": [[each.embedding for each in answer.data] for answer in (default, floats)],
    "tokens": default.usage.prompt_tokens,
    "status": status,
}))
"""


@pytest.mark.slow
@pytest.mark.client("openai", "its oldest release: lists models; embeds, as base64 and as floats; an unknown model")
def test_the_first_release_of_the_official_client(run: Run) -> None:
    got = run(installed("openai-1", "bin/python"), "first.py", FIRST.replace("TEXTS", repr(TEXTS)))
    for vectors in got.pop("vectors"):
        np.testing.assert_allclose(vectors, reference(TEXTS), atol=1e-6)
    assert got == {"models": ["dummy"], "tokens": 6, "status": 404}


JAVASCRIPT = """
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const input = TEXTS;
const vectors = [];
for (const more of [{}, { encoding_format: "float" }]) {
  const answer = await client.embeddings.create({ model: "dummy", input, ...more });
  vectors.push(answer.data.map((each) => Array.from(each.embedding)));
}
const refused = [];
for (const wrong of [{ model: "dumy", input: "one" }, { model: "dummy", input: [[101, 102]] }]) {
  try {
    await client.embeddings.create(wrong);
  } catch (error) {
    refused.push([error.constructor.name, error.status, error.code, error.param]);
  }
}
const models = [];
for await (const each of client.models.list()) models.push(each.id);
console.log(JSON.stringify({ vectors, refused, models }));
"""


@pytest.fixture
def node(short_folder: Path) -> str:
    """The program node, with npm's openai beside the script."""
    modules = installed("npm", "node_modules")
    program = shutil.which("node")
    if program is None:
        pytest.skip("there is no node")
    (short_folder / "node_modules").symlink_to(modules)
    return program


@pytest.mark.client("openai (npm)", "lists models; embeds, as base64 and as floats; errors are those of the client")
def test_the_official_client_of_javascript(run: Run, node: str) -> None:
    got = run(node, "client.mjs", JAVASCRIPT.replace("TEXTS", json.dumps(TEXTS)))
    for vectors in got.pop("vectors"):
        np.testing.assert_allclose(vectors, reference(TEXTS), atol=1e-6)
    assert got == {
        "models": ["dummy"],
        "refused": [
            ["NotFoundError", 404, "model_not_found", "model"],
            ["BadRequestError", 400, "invalid_type", "input"],
        ],
    }


@pytest.mark.client("openai (npm)", "the example of this page")
def test_the_example_in_javascript(run: Run, node: str) -> None:
    source = example("javascript", "OpenAI").replace('"http://127.0.0.1:8080/v1"', "`${process.argv[2]}/v1`")
    shape = re.sub(r"console\.log\((.*)\);", r"console.log(JSON.stringify([\1]));", source)
    assert run(node, "example.mjs", shape) == [1, 16]


TEI = """
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
client = TextEmbeddingsInference(base_url=sys.argv[1], model_name="dummy")
"""
FRAMEWORK = """
import json, sys
{client}
texts = {texts}
print(json.dumps({{"vectors": {vectors}(texts), "one": {one}(texts[0])}}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "vectors", "one"),
    [
        pytest.param(
            "langchain-openai",
            "langchain.embed_documents",
            "langchain.embed_query",
            marks=pytest.mark.client(
                "langchain-openai",
                "the example of this page: `OpenAIEmbeddings` with `check_embedding_ctx_length=False`",
            ),
        ),
        pytest.param(
            "llama-index-embeddings-openai-like",
            "llama_index.get_text_embedding_batch",
            "llama_index.get_query_embedding",
            marks=pytest.mark.client(
                "llama-index-embeddings-openai-like", "the example of this page: `OpenAILikeEmbedding`"
            ),
        ),
        pytest.param(
            "llama-index-embeddings-text-embeddings-inference",
            "client.get_text_embedding_batch",
            "client.get_text_embedding",
            marks=pytest.mark.client(
                "llama-index-embeddings-text-embeddings-inference",
                "`TextEmbeddingsInference`, which calls TEI's `/embed`",
            ),
        ),
    ],
)
def test_frameworks(run: Run, package: str, vectors: str, one: str) -> None:
    client = example("python", "langchain_openai").replace('"http://127.0.0.1:8080/v1"', 'f"{sys.argv[1]}/v1"')
    client = TEI if package.endswith("inference") else client
    source = FRAMEWORK.format(client=client, texts=TEXTS, vectors=vectors, one=one)
    got = run(installed("frameworks", "bin/python"), "example.py", source)
    np.testing.assert_allclose(got["vectors"], reference(TEXTS), atol=1e-6)
    np.testing.assert_allclose(got["one"], reference(TEXTS[:1])[0], atol=1e-6)


@pytest.mark.client("curl", "a body of 2 MB, which curl sends after `100 Continue`")
def test_curl_sends_2_mb(gateway: Running, short_folder: Path) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("there is no curl")
    (short_folder / "body").write_text(json.dumps({"model": "dummy", "input": ["two words"] + ["word " * 400] * 1000}))
    command = [curl, "-v", "--fail-with-body", "--json", "@body", f"{gateway.url}/v1/embeddings"]
    done = subprocess.run(command, cwd=short_folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "HTTP/1.1 100 Continue" in done.stderr
    answer = json.loads(done.stdout)
    np.testing.assert_allclose(answer["data"][0]["embedding"], reference(["two words"])[0], atol=1e-6)
    assert len(answer["data"]) == 1001
