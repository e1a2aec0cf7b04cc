"""OpenAI's batch files: which requests are taken, and the lines that answer them."""

from __future__ import annotations

import base64
import io
import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from embedctl.corpus.batch import BatchCorpus, is_batch, url_of
from embedctl.corpus.reading import open_corpus
from embedctl.corpus.rows import Rows
from embedctl.destinations.answers import Answers, ReadRequests
from embedctl.destinations.jsonl import JsonlWriter
from embedctl.destinations.writer import Content
from embedctl.store import JobState, JobStatus
from embedctl.waiting.results import ChunkVectors, FailedRecord, no_records
from embedctl_config.errors import BatchFileError, InputError, JobLost, JobNotFound
from embedctl_config.outputs import Output
from embedctl_config.wire import ErrorCode, RecordKind

#: Published by vLLM for its own command (vllm-project/vllm, pull request 7132).
OF_VLLM = (
    '{"custom_id": "request-1", "method": "POST", "url": "/v1/embeddings", "body": {"model": "intfloat/e5", '
    '"input": "You are a helpful assistant."}}\n'
    '{"custom_id": "request-2", "method": "POST", "url": "/v1/embeddings", "body": {"model": "intfloat/e5", '
    '"input": "You are an unhelpful assistant."}}\n'
)


def a_request(custom_id: object = "a", *, top: dict[str, Any] | None = None, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "body": {"input": "text", **body}, **(top or {})}


def corpus_of(folder: Path, *rows: object, unique: bool = True, limit: int | None = None) -> BatchCorpus:
    """A batch file with a line for each row: a string as it is, any other as JSON."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "r.jsonl").write_text("".join(f"{line}\n" for line in lines), "utf-8", "surrogateescape")
    files = open_corpus(str(folder / "r.jsonl"), rows=Rows(100)).files
    return BatchCorpus(files, 100, limit, unique=unique, url=url_of(files[0]))


def refusals(folder: Path, *rows: object, **options: Any) -> list[dict[str, Any]]:
    model, dimensions = options.pop("model", None), options.pop("dimensions", None)
    with pytest.raises(BatchFileError) as raised:
        corpus_of(folder, *rows, **options).check(model, dimensions)
    return [dict(each) for each in raised.value.data]


def test_the_lines_that_vllm_publishes_are_taken(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, OF_VLLM)
    assert is_batch(corpus.files[0])
    assert corpus.check() == ("intfloat/e5", None)
    assert [(record.id, record.text) for record in corpus.records()] == [
        ("request-1", b"You are a helpful assistant."),
        ("request-2", b"You are an unhelpful assistant."),
    ]


def test_a_request_of_several_texts_is_a_record_for_each(tmp_path: Path) -> None:
    corpus = corpus_of(
        tmp_path,
        a_request("a", input=["one", None, "x" * 101], encoding_format="base64", user="u", dimensions=None),
        "",
        a_request("b", input="two", top={"method": None, "url": None}),
        a_request("c", input={"a": 1}),
    )
    assert corpus.check() == (None, None)
    records = list(corpus.records())
    assert [(record.kind, record.id) for record in records] == [
        (RecordKind.TEXT, "a"),
        (RecordKind.NOT_TEXT, "a"),
        (RecordKind.OVERSIZE, "a"),
        (RecordKind.TEXT, "b"),
        (RecordKind.NOT_TEXT, "c"),
    ]
    assert [json.loads(record.kept or b"") for record in records[1:4]] == [
        {"index": 1, "inputs": 3, "encoding_format": "base64"},
        {"index": 2, "inputs": 3, "encoding_format": "base64"},
        {"index": 0, "inputs": 1, "encoding_format": "float"},
    ]


def test_text_that_is_not_utf8_fails_alone(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, '{"custom_id": "a", "body": {"input": "\udcff"}}')
    corpus.check()
    assert [record.kind for record in corpus.records()] == [RecordKind.INVALID_UTF8]


@pytest.mark.parametrize(
    ("row", "code", "param", "words"),
    [
        ("{", "invalid_json_line", None, "not JSON"),
        ("[1]", "invalid_json_line", None, "expected an object"),
        ({"body": {"input": "x"}}, "missing_required_parameter", "custom_id", "no custom_id"),
        (a_request(7), "invalid_type", "custom_id", "custom_id is a number, not a string"),
        (a_request("x" * 1025), "invalid_value", "custom_id", "longer than 1,024 bytes"),
        (a_request("\ud800"), "invalid_value", "custom_id", "not valid UTF-8"),
        (a_request(top={"method": "GET"}), "invalid_value", "method", "'GET', not 'POST'"),
        (a_request(top={"url": "/v1/chat/completions"}), "url_mismatch", "url", "not '/v1/embeddings'"),
        ({"custom_id": "a"}, "missing_required_parameter", "body", "no body"),
        ({"custom_id": "a", "body": {}}, "missing_required_parameter", "body.input", "no input"),
        (a_request(input=[]), "invalid_value", "body.input", "0 texts; a request has 1 to 2,048"),
        (a_request(input=["x"] * 2049), "invalid_value", "body.input", "2,049 texts"),
        (a_request(input=[1, 2]), "invalid_type", "body.input", "token ids"),
        (a_request(input=[[1], [2]]), "invalid_type", "body.input", "token ids"),
        (a_request(dimensions=0), "invalid_value", "body.dimensions", "dimensions is 0"),
        (a_request(dimensions=True), "invalid_value", "body.dimensions", "dimensions is True"),
        (a_request(encoding_format="int8"), "invalid_value", "body.encoding_format", "'int8': float or base64"),
        (a_request(model=7), "invalid_type", "body.model", "model is a number, not a name"),
        (a_request(model=""), "invalid_value", "body.model", "use 1 to 200 characters"),
        (a_request(model="\ud800"), "invalid_value", "body.model", "only letters, digits"),
        (a_request(truncate_prompt_tokens=5), "unsupported_parameter", "body.truncate_prompt_tokens", "--long"),
        (a_request(input_type="query"), "unsupported_parameter", "body.input_type", "--prompt"),
        (a_request(priority=1), "unsupported_parameter", "body.priority", "priority can't be given"),
        ({"custom_id": "a", "body": {"\ud800": 1}}, "unsupported_parameter", "body.\\ud800", "\\ud800 can't be"),
    ],
)
def test_wrong_requests_are_refused_by_name(
    row: object, code: str, param: str | None, words: str, tmp_path: Path
) -> None:
    (error,) = refusals(tmp_path, a_request("before"), "", row)
    assert (error["code"], error["param"], error["line"]) == (code, param, 3)
    assert words in error["message"]


SPARSE = {"custom_id": "s", "url": "/embed_sparse", "body": {"inputs": ["one", "two"]}}
MULTI = {"custom_id": "m", "url": "/pooling", "body": {"input": "one", "task": "token_embed", "model": "m"}}


def of_sparse(**body: Any) -> dict[str, Any]:
    return {"custom_id": "b", "body": body}


def test_requests_name_the_vectors_that_they_ask_for(tmp_path: Path) -> None:
    for row, texts in ((SPARSE, 2), (MULTI, 1)):
        corpus = corpus_of(tmp_path, row)
        corpus.check()
        assert (corpus.inputs, next(corpus.records()).text) == (texts, b"one")
    for first, row, code, param in (
        (SPARSE, MULTI, "url_mismatch", "url"),
        (SPARSE, a_request("b", top={"url": "/v1/embeddings"}), "url_mismatch", "url"),
        (a_request(), SPARSE, "url_mismatch", "url"),
        (SPARSE, a_request("b"), "unsupported_parameter", "body.input"),
        (SPARSE, of_sparse(inputs="x", dimensions=4), "unsupported_parameter", "body.dimensions"),
        (SPARSE, of_sparse(inputs="x", truncate=True), "unsupported_parameter", "body.truncate"),
        (SPARSE, of_sparse(), "missing_required_parameter", "body.inputs"),
        (MULTI, a_request("b", task="embed"), "invalid_value", "body.task"),
        (MULTI, a_request("b", task=["x"]), "invalid_value", "body.task"),
        (MULTI, a_request("b", dimensions=4), "unsupported_parameter", "body.dimensions"),
        (MULTI, a_request("b", input=["x" * 40_000] * 2), "max_tokens_per_request", "body.input"),
    ):
        (error,) = refusals(tmp_path, first, row)
        assert (error["code"], error["param"], error["line"]) == (code, param, 2), error


def test_all_requests_have_one_model_and_one_number_of_dimensions(tmp_path: Path) -> None:
    same = [
        a_request("a", model="m", dimensions=4),
        a_request("b", dimensions=4),
        a_request("c", model="m", dimensions=4),
    ]
    assert corpus_of(tmp_path, *same).check() == ("m", 4)
    errors = refusals(tmp_path, *same, a_request("d", model="n", dimensions=4), a_request("e", model="m"))
    assert [(error["code"], error["param"], error["line"]) for error in errors] == [
        ("model_mismatch", "body.model", 4),
        ("model_mismatch", "body.dimensions", 5),
    ]
    assert "'n', and 'm' in " in errors[0]["message"]


def test_the_command_may_name_what_the_requests_do_not(tmp_path: Path) -> None:
    assert corpus_of(tmp_path, a_request()).check("m", 4) == ("m", 4)
    short = a_request(model="all-MiniLM-L6-v2")
    assert corpus_of(tmp_path, short).check("sentence-transformers/all-MiniLM-L6-v2") == (
        "sentence-transformers/all-MiniLM-L6-v2",
        None,
    )
    (error,) = refusals(tmp_path, a_request(model="n"), model="m")
    assert "'n', and 'm' in --model (EMBEDCTL_MODEL)" in error["message"]
    (error,) = refusals(tmp_path, a_request(dimensions=3), dimensions=4)
    assert "3, and 4 in --dims" in error["message"]


def test_every_custom_id_is_unique_unless_that_is_not_wanted(tmp_path: Path) -> None:
    rows = [a_request("a"), a_request("b"), a_request("a", priority=1), a_request("b")]
    errors = refusals(tmp_path, *rows)
    assert [(error["code"], error["line"]) for error in errors] == [
        ("unsupported_parameter", 3),
        ("duplicate_custom_id", 3),
        ("duplicate_custom_id", 4),
    ]
    assert errors[2]["message"].endswith("r.jsonl, line 2")
    assert refusals(tmp_path, *rows, unique=False) == errors[:1]


def test_all_mistakes_are_counted_and_the_first_ones_named(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError) as raised:
        corpus_of(tmp_path, a_request("right"), *(a_request(str(i), priority=i + 1) for i in range(30))).check()
    lines = str(raised.value).splitlines()
    assert lines[0] == "30 requests are refused, and nothing is queued."
    assert (len(lines), lines[-1], len(raised.value.data)) == (12, "…", 10)
    assert "r.jsonl, line 2: unsupported_parameter (body.priority): priority can't be given" in lines[1]


def test_a_file_without_a_request_is_an_empty_batch(tmp_path: Path) -> None:
    (error,) = refusals(tmp_path, "", "  ")
    assert (error["code"], error["line"]) == ("empty_batch", None)


def test_standard_input_is_checked_in_full_and_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(OF_VLLM.encode()))))
    files = open_corpus("-", rows=Rows(100)).files
    assert is_batch(files[0])
    corpus = BatchCorpus(files, 100, None, unique=True)
    assert corpus.check() == ("intfloat/e5", None)
    assert [record.id for record in corpus.records()] == ["request-1", "request-2"]
    assert not corpus.rereadable


@pytest.mark.parametrize(
    "line",
    [
        '{"text": "x"}',
        '{"text": "x", "custom_id": 1, "body": {}}',
        '{"custom_id": 1}',
        '{"custom_id": 1, "body": "x"}',
        "[]",
        "{",
        "",
    ],
)
def test_other_files_are_no_batch_files(line: str, tmp_path: Path) -> None:
    assert not is_batch(corpus_of(tmp_path, "", line).files[0])


# ------------------------------------------------------------------------------------------------------------- answers


def job_of(**changes: Any) -> JobStatus:
    facts: Any = {
        "id": "job",
        "model": "m",
        "options": {"batch_file": True},
        "state": JobState.STOPPED,
        "stopped_by": "stop",
        "sealed": True,
        "records": 100,
        **changes,
    }
    return SimpleNamespace(**facts)  # type: ignore[return-value]


def answers_of(read: ReadRequests | None = None, **changes: Any) -> Answers:
    return Answers(job_of(**changes), lambda: job_of(**changes), read)


def chunk(
    first: int, *rows: tuple[str, int, int], failed: dict[int, ErrorCode] | None = None, form: str = "float"
) -> Any:
    """A chunk with a record for each (custom_id, index, inputs). Each has as many tokens as its position plus one."""
    positions = np.arange(first, first + len(rows))
    vectors = np.stack([np.array([position, 0.1], np.float32) for position in positions])
    errors = [
        FailedRecord(at, rows[at - first][0], code, f"it is {code}") for at, code in sorted((failed or {}).items())
    ]
    return ChunkVectors(
        positions=positions,
        ids=[row[0] for row in rows],
        vectors=vectors,
        errors=errors,
        truncations=[],
        kept=[{"index": index, "inputs": inputs, "encoding_format": form} for _, index, inputs in rows],
        tokens=positions + 1,
    )


def lines_of(*chunks: ChunkVectors, answers: Answers | None = None) -> list[dict[str, Any]]:
    answers = answers or answers_of()
    return [json.loads(line) for each in chunks for line, _ in answers.of(each)] + [
        json.loads(answer.line) for answer in answers.end()
    ]


def test_a_request_is_answered_as_openai_does() -> None:
    (line,) = lines_of(chunk(4, ("a", 0, 2), ("a", 1, 2)))
    assert line == {
        "id": "batch_req_job_4",
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": "req_job_4",
            "body": {
                "object": "list",
                "data": [
                    {"object": "embedding", "index": 0, "embedding": [4.0, 0.1]},
                    {"object": "embedding", "index": 1, "embedding": [5.0, 0.1]},
                ],
                "model": "m",
                "usage": {"prompt_tokens": 11, "total_tokens": 11},
            },
        },
        "error": None,
    }
    types = pytest.importorskip("openai.types", reason="needs the package openai")
    body = line["response"]["body"]
    assert types.CreateEmbeddingResponse.model_validate(body, strict=True).model_dump() == body


def test_base64_holds_the_bytes_of_float32() -> None:
    (line,) = lines_of(chunk(3, ("a", 0, 1), form="base64"))
    text = line["response"]["body"]["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == [3.0, float(np.float32(0.1))]


@pytest.mark.parametrize(
    ("code", "status", "kind", "theirs", "param"),
    [
        (ErrorCode.EMPTY, 400, "invalid_request_error", "empty_input", "input"),
        (ErrorCode.TOO_LONG, 400, "invalid_request_error", "context_length_exceeded", "input"),
        (ErrorCode.NOT_TEXT, 400, "invalid_request_error", "invalid_type", "input"),
        (ErrorCode.INVALID_UTF8, 400, "invalid_request_error", "invalid_type", "input"),
        (ErrorCode.OUT_OF_MEMORY, 500, "server_error", "out_of_memory", None),
        (ErrorCode.ENCODE_ERROR, 500, "server_error", "encode_error", None),
        (ErrorCode.NON_FINITE, 500, "server_error", "non_finite", None),
        (ErrorCode.CRASHED_WORKER, 500, "server_error", "crashed_worker", None),
    ],
)
def test_a_request_fails_as_at_openai(code: ErrorCode, status: int, kind: str, theirs: str, param: str | None) -> None:
    one, several = lines_of(chunk(0, ("a", 0, 1), ("b", 0, 2), ("b", 1, 2), failed={0: code, 2: code}))
    assert one["error"] is None
    assert one["response"] == {
        "status_code": status,
        "request_id": "req_job_0",
        "body": {"error": {"message": f"it is {code}", "type": kind, "param": param, "code": theirs}},
    }
    assert several["response"]["body"]["error"]["message"] == f"input[1]: it is {code}"


def test_a_request_that_was_not_encoded_in_full_says_so() -> None:
    lines = lines_of(
        chunk(0, ("a", 0, 3), ("a", 1, 3)),
        chunk(7, ("b", 0, 1)),
        chunk(9, ("c", 1, 2), ("d", 0, 2)),
        chunk(14, ("e", 2, 3)),
        chunk(15, ("f", 0, 2)),
    )
    assert [(line["custom_id"], line["response"] is None) for line in lines] == [
        ("a", True),
        ("b", False),
        ("c", True),
        ("d", True),
        ("e", True),
        ("f", True),
    ]
    assert lines[0]["error"] == {
        "code": "batch_cancelled",
        "message": "This request was not executed, because the job was stopped.",
    }


#: Requests and their inputs: a 0 … 2, b 3, c 4 and 5, d 6, e 7 … 9.
SIZES = {"a": 3, "b": 1, "c": 2, "d": 1, "e": 3}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, "batch_cancelled"),
        ({"state": JobState.CANCELLED, "stopped_by": None}, "batch_cancelled"),
        ({"state": JobState.FAILED, "stopped_by": "max_errors"}, "batch_failed"),
    ],
)
def test_requests_that_were_not_run_have_a_line_where_the_file_is_at_hand(changes: dict[str, Any], code: str) -> None:
    types = pytest.importorskip("openai.types", reason="needs the package openai")
    answers = answers_of(SIZES.items, records=10, **changes)
    lines = lines_of(chunk(3, ("b", 0, 1)), chunk(6, ("d", 0, 1), ("e", 0, 3)), answers=answers)
    assert [line["custom_id"] for line in lines] == list(SIZES)
    assert [line["id"] for line in lines] == [f"batch_req_job_{first}" for first in (0, 3, 4, 6, 7)]
    assert [line["response"] is None for line in lines] == [True, False, True, False, True]
    assert {line["error"]["code"] for line in lines if line["error"]} == {code}
    for line in lines:
        if line["error"]:
            assert types.BatchError.model_validate(line["error"]).code == code


def test_a_job_without_any_result_has_a_line_for_each_request() -> None:
    assert [line["custom_id"] for line in lines_of(answers=answers_of(SIZES.items, records=10))] == list(SIZES)
    half_submitted = answers_of(SIZES.items, records=4, sealed=False)
    assert [line["custom_id"] for line in lines_of(answers=half_submitted)] == list(SIZES)
    limited = answers_of(SIZES.items, records=4)
    assert [line["custom_id"] for line in lines_of(answers=limited)] == ["a", "b"]


@pytest.mark.parametrize(
    "sizes", [{"a": 4, "b": 1}, {"x": 1, "y": 1}, {"a": 3, "x": 1, "c": 2, "d": 1, "e": 3}, {"a": 2, "b": 2}]
)
def test_requests_of_another_file_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(InputError, match="not the requests that job job was made of: its request at position 3"):
        lines_of(chunk(3, ("b", 0, 1)), answers=answers_of(sizes.items, records=10))


def test_a_job_that_is_gone_has_expired() -> None:
    answers = answers_of(SIZES.items, records=10)
    list(answers.of(chunk(0, ("a", 0, 3), ("a", 1, 3), ("a", 2, 3))))
    assert not answers.give_up(JobLost("it may go on"))
    assert answers.give_up(JobNotFound("it is gone"))
    lines = [json.loads(line) for line, _ in answers.end()]
    assert [(line["custom_id"], line["error"]["code"]) for line in lines] == [
        (name, "batch_expired") for name in ("b", "c", "d", "e")
    ]
    assert lines[0]["error"]["message"] == ("This request could not be executed before the completion window expired.")
    assert not answers_of().give_up(JobNotFound("and nobody knows what it was to run"))


#: Not run: n, at 10 … 12, p, at 14 and 15, and z.
REQUESTS = {"a": 1, "b": 1, "c": 5, "d": 2, "e": 1, "n": 3, "o": 1, "p": 2, "q": 2, "z": 12}


def test_each_request_has_one_line_after_a_fetch_that_died_too(tmp_path: Path) -> None:
    chunks = [
        chunk(0, ("a", 0, 1), ("b", 0, 1), ("c", 0, 5), failed={1: ErrorCode.EMPTY}),
        chunk(3, ("c", 1, 5), ("c", 2, 5), ("c", 3, 5)),
        chunk(6, ("c", 4, 5), ("d", 0, 2)),
        chunk(8, ("d", 1, 2), failed={8: ErrorCode.EMPTY}),
        chunk(9, ("e", 0, 1)),
        no_records(2),
        chunk(13, ("o", 0, 1)),
        chunk(16, ("q", 0, 2)),
        chunk(17, ("q", 1, 2)),
    ]
    make = partial(Answers, job_of(records=30), job_of, REQUESTS.items)
    JsonlWriter(Content(tmp_path / "r.jsonl", 30), make()).write(chunks[0])
    writer = JsonlWriter(Content(tmp_path / "r.jsonl", 30), make())
    for each in chunks:
        writer.write(each)
    names = [file.name for file in writer.finish()]
    assert names == ["r.jsonl", "r.errors.jsonl"]
    order = [[json.loads(line)["custom_id"] for line in (tmp_path / name).read_text().splitlines()] for name in names]
    assert order == [["a", "c", "e", "o", "q"], ["b", "d", "n", "p", "z"]]
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("kind", Output)
def test_a_chunk_that_was_not_encoded_has_no_answers(kind: Output) -> None:
    assert lines_of(no_records(0), answers=answers_of(options={"vectors": [kind]})) == []


def test_no_file_of_errors_is_left_where_none_failed(tmp_path: Path) -> None:
    (tmp_path / "r.errors.jsonl").write_text("of an earlier job")
    writer = JsonlWriter(Content(tmp_path / "r.jsonl", 1), Answers(job_of(), job_of))
    writer.write(chunk(0, ("a", 0, 1)))
    assert [path.name for path in writer.finish()] == ["r.jsonl"]
    assert [path.name for path in tmp_path.iterdir()] == ["r.jsonl"]
