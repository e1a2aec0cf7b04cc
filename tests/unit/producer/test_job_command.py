"""The options that `run` and `submit` share, and what they mean."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from embedctl import SettingsError, aenqueue_embeddings, enqueue_embeddings
from embedctl.cli import main
from embedctl.cli.destination import DatabaseUrl
from embedctl.cli.job_command import _prompt, _unique_ids_taken_from
from embedctl.cli.run import run
from embedctl.cli.submit import submit
from embedctl.jobs.options import MAX_KEY_BYTES, MAX_PROMPT_BYTES, JobOptions, SubmitOptions, parse_budget
from embedctl_config.settings import MAX_CHUNK_RECORDS
from tests.support.memory_destination import take_memo
from tests.support.packages import need

OWN = {"run": {"cpus", "pooling", "pull"}, "submit": {"ttl_s", "resume", "drain", "wait"}}
SECTIONS = ("Corpus", "Text", "Vectors", "Destination", "Limits")


def shared(command: click.Command) -> list[dict[str, Any]]:
    """The options that are not the command's own, as they are declared."""
    params = [each.to_info_dict() for each in command.params if each.name not in OWN[str(command.name)]]
    for each in params:
        if each["name"] in ("hardware", "dry_run"):
            del each["help"]
    return params


def test_run_and_submit_have_the_same_options_for_a_job() -> None:
    assert shared(run) == shared(submit)


def test_an_option_of_one_value_is_given_once() -> None:
    for name, args, refused in (
        ("submit", ["--text-field", "title", "--text-field=body"], "--text-field takes one value, and is given 2."),
        ("submit", ["-o", "a.npy", "--output", "b.npy"], "--output takes one value, and is given 2."),
        ("submit", ["-q", "--quiet", "-i", "/nowhere/a", "-i", "/nowhere/b"], ""),
    ):
        result = CliRunner().invoke(main, [name, "corpus.jsonl", *args])
        assert result.exit_code == 2
        assert (refused in result.output) if refused else ("takes one value" not in result.output)


@pytest.mark.parametrize(("name", "own"), [("run", "Worker"), ("submit", "Job")])
def test_help_lists_the_options_by_groups(name: str, own: str) -> None:
    lines = CliRunner().invoke(main, [name, "--help"]).output.splitlines()
    headings = [line.removesuffix(":") for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert headings == [*SECTIONS, own, "Output"]
    assert [line.split()[0] for line in lines if "--help" in line] == ["-h,"]


@pytest.mark.parametrize(
    ("words", "prompt", "name"),
    [
        (None, None, None),
        ("", "", None),
        ("query: ", "query: ", None),
        ("@query", None, "query"),
        ("@@home: ", "@home: ", None),
    ],
)
def test_a_prompt_is_a_text_or_a_name(words: str | None, prompt: str | None, name: str | None) -> None:
    options = SubmitOptions.of(**_prompt(words))
    assert (options.prompt, options.prompt_name) == (prompt, name)


@pytest.mark.parametrize(
    ("duplicates", "output", "unique"),
    [
        (None, None, None),
        ("error", None, True),
        ("all", None, False),
        (None, "lancedb:x", None),
        ("first", "lancedb:x", None),
    ],
)
def test_ids_are_checked_for_files_alone(duplicates: str | None, output: str | None, unique: bool | None) -> None:
    url = None if output is None else DatabaseUrl(output)
    assert _unique_ids_taken_from({"duplicates": duplicates, "output": url}) is unique


def test_the_options_of_a_caller_are_those_of_a_submission() -> None:
    ours = {"max_errors_share", "resume", "batch_file", "drain", "column_types", "kept"}
    assert {each.name for each in fields(SubmitOptions)} - ours == JobOptions.__optional_keys__
    documented = {line.strip().partition(":")[0] for line in str(JobOptions.__doc__).splitlines()}
    assert documented >= JobOptions.__optional_keys__


def test_an_unknown_option_is_named() -> None:
    given: dict[str, Any] = {"modle": "m"}
    with pytest.raises(TypeError, match=r"no option 'modle'\. Did you mean 'model'\?"):
        enqueue_embeddings(["a"], **given)
    with pytest.raises(TypeError, match="no option 'resume'"):
        aenqueue_embeddings(["a"], resume="20260101-000000-0000000000").send(None)  # type: ignore[call-arg]  # on purpose


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"duplicates": "first"}, "duplicates 'first' is neither all nor error"),
        ({"lane": "fast"}, "lane 'fast' is none of"),
        ({"tenant": "a b"}, "tenant 'a b': use 1 to 64 characters, only letters, digits and . _ - / @"),
        ({"tenant": "x" * 65}, "use 1 to 64 characters"),
        ({"prompt": "a", "prompt_name": "query"}, "leave one of them out"),
        ({"prompt_name": ""}, "prompt_name is empty"),
        ({"prompt_name": "x" * 201}, "201 bytes long, and the maximum is 200"),
        ({"keep": [f"f{i}" for i in range(33)]}, "33 fields, and the maximum is 32"),
        ({"model": ""}, "model name ''"),
        ({"long": "up"}, "long 'up' is none of cut, cut-left, cut-right, error, mean"),
        ({"ttl": 0.5}, "ttl 0.5 is not between 1 and"),
        ({"ttl": "60"}, "ttl '60' is not between"),
        ({"ttl": True}, "ttl True is not between"),
        ({"chunk_size": "2"}, "chunk_size '2' is not a whole number"),
        ({"chunk_size": True}, "chunk_size True is not a whole number"),
        ({"chunk_size": 1.5}, "chunk_size 1.5 is not a whole number"),
        ({"chunk_size": MAX_CHUNK_RECORDS + 1}, "chunk_size 16385 is not a whole number between 1 and 16384"),
        ({"max_errors": 2.5}, "max_errors 2.5 is neither"),
        ({"prompt": ["a"]}, "prompt is a list, not a string"),
        ({"prompt": "\ud800"}, "prompt is not valid UTF-8"),
        ({"prompt": "x" * (MAX_PROMPT_BYTES + 1)}, "prompt is 16,385 bytes long, and the maximum is 16,384"),
        ({"idempotency_key": ""}, "idempotency_key is empty"),
        ({"idempotency_key": 7}, "idempotency_key is a number, not a string"),
        ({"idempotency_key": "\udcff"}, "idempotency_key is not valid UTF-8"),
        ({"idempotency_key": "x" * (MAX_KEY_BYTES + 1)}, "idempotency_key is 65,537 bytes long"),
        ({"keep": ["tokens"], "count_tokens": True}, "the number of tokens"),
        ({"keep": ["text_sha256"], "digests": True}, "the digest of a text"),
    ],
)
def test_options_are_checked_before_anything_else(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        SubmitOptions.of(**options)


@pytest.mark.parametrize(
    ("given", "budget"),
    [
        (None, (None, None)),
        (0, (0, None)),
        (100, (100, None)),
        ("100", (100, None)),
        ("1%", (None, 0.01)),
        ("0%", (None, 0.0)),
        ("100%", (None, 1.0)),
    ],
)
def test_a_budget_is_a_number_or_a_share(given: int | str | None, budget: tuple[int | None, float | None]) -> None:
    assert parse_budget(given) == budget


@pytest.mark.parametrize("given", [-1, "-1", "", "many", "101%", "-1%", "%", "nan%", 0.01, True])
def test_what_is_neither_is_refused_with_both_forms(given: int | str) -> None:
    with pytest.raises(SettingsError, match=r"max_errors .* such as 100 nor a share such as 1%"):
        parse_budget(given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--delete",), "--delete goes with --sync"),
        (("--sync", "--delete-at-most", "5"), "--delete-at-most goes with --delete"),
        (("--sync", "--delete", "--delete-at-most", "many"), "--delete-at-most 'many' is neither"),
        (("--sync", "--delete", "--limit", "3"), "omit --delete or --limit"),
        (("--sync", "--duplicates", "last"), "omit --duplicates"),
        (("--cache", "c.db"), "name it with -o"),
        (("--no-clobber",), "are for files"),
        (("--dtype", "int8"), "does not search vectors of the dtype int8"),
        (("--duplicates", "all"), "duplicates is one of"),
        (("--format", "openai-batch"), "is answered in a .jsonl"),
    ],
)
def test_what_does_not_go_together_with_a_table_is_refused_before_anything_is_written(
    options: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = '{"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"model": "m", "input": "one"}}'
    Path("corpus.jsonl").write_text((line if "openai-batch" in options else '{"id": "a", "text": "one"}') + "\n")
    take_memo(monkeypatch)
    done = CliRunner().invoke(main, ["run", "corpus.jsonl", "-o", "memo:x", *options])
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert [file.name for file in tmp_path.iterdir()] == ["corpus.jsonl"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "Missing option '--output' / '-o'"),
        (("-o", "x.npy", "--duplicates", "position"), "is for the URL of a database"),
        (("-o", "postgresql:///x?table=t", "--format", "npy"), "are for files"),
        (("-o", "postgresql:///x?table=t", "--dtype", "int8"), "does not search vectors of the dtype int8"),
        (("-o", "postgresql://me:hunter2@db/x?table=t"), "PGPASSWORD"),
        (("-o", "parquet://x"), "embedctl destinations"),
    ],
)
def test_options_of_fetch_that_do_not_go_together(flags: tuple[str, ...], message: str) -> None:
    need("psycopg")
    done = CliRunner().invoke(main, ["fetch", "20261121-000000-0000000000", *flags])
    assert done.exit_code == 2
    assert message in done.output
    assert "hunter2" not in done.output
