"""Every command where no extra is installed: it does its work, or one line names the extra that it lacks."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest

from embedctl.cli import main
from embedctl_bench.__main__ import main as bench
from embedctl_gateway.__main__ import main as gateway
from embedctl_workers.commands.model import main as model
from tests.support.alone import Commands, commands_of, make_environment
from tests.support.workers import StartWorker

pytestmark = pytest.mark.slow

#: Command → the extra that it names, or none if it ends well. JOB is a job with all its vectors.
COMMANDS = {
    "--help": "",
    "model --help": "",
    "bench --help": "",
    "gateway --help": "",
    "worker --help": "",
    "up --help": "",
    "submit c.jsonl": "",
    "submit c.jsonl --dry-run": "",
    "submit c.parquet": "parquet",
    "submit c.jsonl -o v.parquet": "parquet",
    "submit c.jsonl --drain -o s3://b/p/": "s3",
    "submit c.jsonl -o qdrant+http://127.0.0.1:1/c": "qdrant",
    "status JOB": "",
    "list": "",
    "wait JOB": "",
    "errors JOB": "",
    "fetch JOB -o f.npy": "",
    "retry JOB": "",
    "destinations": "",
    "doctor": "",
    "config show": "",
    "config acl --passwords secrets": "",
    "worker --ready": "",
    "worker --class cpu": "torch",
    "worker --class cpu-int8": "onnx",
    "up --dry-run": "",
    "model list": "",
    "model show all-MiniLM-L6-v2": "torch",
    "model build all-MiniLM-L6-v2 --class cpu-int8": "torch",
    "model pull all-MiniLM-L6-v2": "torch",
    "model tune all-MiniLM-L6-v2 --class cpu": "torch",
    "model verify all-MiniLM-L6-v2 --class cpu": "torch",
    "bench request": "bench",
    "bench grid": "bench",
    "bench engines": "bench",
    "gateway": "gateway",
    "gateway key add me --keys k": "",
    "gateway key list --keys k": "",
    "gateway key remove me --keys k": "",
    "flower": "flower",
    "metrics": "metrics",
    "stop JOB": "",
    "cancel JOB": "",
    "discard JOB": "",
}
_GROUPS = {"model": model, "bench": bench, "gateway": gateway}
_EXTRA = re.compile(r"pip install 'embedctl\[([\w-]+)\]'")


def leaves(command: click.Command, name: str = "") -> Iterator[str]:
    """All commands below one, by their full names."""
    group = _GROUPS.get(name, command)
    if isinstance(group, click.Group):
        for each in group.commands.values():
            yield from leaves(each, f"{name} {each.name}".strip())
    if not isinstance(group, click.Group) or group.invoke_without_command:
        yield name


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    folder = tmp_path_factory.mktemp("bare")
    with commands_of(make_environment(folder / "env"), folder) as commands:
        (folder / "c.jsonl").write_text('{"id": "a", "text": "one"}\n{"id": "b", "text": "two words"}\n')
        (folder / "c.parquet").touch()
        yield commands


def test_every_command_is_tried() -> None:
    tried = [*COMMANDS, "run"]
    assert [name for name in leaves(main) if not any(f"{each} ".startswith(f"{name} ") for each in tried)] == []


def test_each_works_or_names_its_extra(bare: Commands, environment: dict[str, str], start_worker: StartWorker) -> None:
    start_worker()
    job = bare.run(["submit", "c.jsonl"], environment).out.strip()
    wrong = {}
    for command, extra in COMMANDS.items():
        ended = bare.run(command.replace("JOB", job).split(), environment)
        named = _EXTRA.findall(ended.err)
        if "Traceback" in ended.err or (ended.status, named) != ((1, [extra]) if extra else (0, [])):
            wrong[command] = ended
    private = bare.run(["run", "c.jsonl", "-o", "v.npy"], {**environment, "EMBEDCTL_REDIS_URL": ""})
    if (private.status, _EXTRA.findall(private.err)) != (1, ["local"]):
        wrong["run, with a private Redis"] = private
    assert wrong == {}
