"""Every command where no extra is installed: it does its work, or one line names the extra that it lacks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import click
import pytest

from embedctl.broker import Broker
from embedctl.cli import main
from embedctl_bench.__main__ import main as bench
from embedctl_gateway.__main__ import main as gateway
from embedctl_workers.commands.model import main as model
from tests.support.alone import Commands, commands_of, make_environment
from tests.support.workers import StartWorker

pytestmark = pytest.mark.slow

#: Command → the extra that it names, or none if it ends well. JOB is a job with all its vectors.
COMMANDS = {
    "submit c.jsonl": "",
    "submit c.jsonl -o v.npy": "",
    "submit c.jsonl -o v.jsonl": "",
    "submit c.jsonl --dry-run": "",
    "submit c.parquet": "parquet",
    "submit c.jsonl.zst": "parquet",
    "submit c.jsonl -o v.parquet": "parquet",
    "submit c.jsonl --drain -o parts/": "parquet",
    "submit c.jsonl --drain -o s3://b/p/": "s3",
    "submit c.jsonl -o qdrant:///x?collection=c": "qdrant",
    "submit c.jsonl -o qdrant+http://127.0.0.1:1/c": "qdrant",
    "submit c.jsonl -o postgresql://127.0.0.1:1/d?table=t": "pgvector",
    "submit c.jsonl -o lancedb:///x?table=t": "lancedb",
    "status": "",
    "status JOB": "",
    "list": "",
    "wait JOB": "",
    "errors JOB": "",
    "fetch JOB -o f.npy": "",
    "fetch JOB -o -": "",
    "fetch JOB -o f.parquet": "parquet",
    "fetch JOB -o parts/": "parquet",
    "fetch JOB -o s3://b/p/": "s3",
    "fetch JOB -o qdrant:///x?collection=c": "qdrant",
    "retry JOB": "",
    "destinations": "",
    "doctor": "",
    "config show": "",
    "config acl --passwords secrets": "",
    "worker --ready": "",
    "worker --class cpu": "torch",
    "worker --class cpu-int8": "onnx",
    "up --dry-run": "",
    "up --dry-run --class cpu-int8": "",
    "model list": "",
    "model show all-MiniLM-L6-v2": "torch",
    "model build all-MiniLM-L6-v2 --class cpu-int8": "torch",
    "model pull all-MiniLM-L6-v2": "torch",
    "model tune all-MiniLM-L6-v2 --class cpu": "torch",
    "model verify all-MiniLM-L6-v2 --class cpu": "torch",
    "bench request": "bench",
    "bench request --http --quick": "bench",
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
        for name in ("c.parquet", "c.jsonl.zst"):
            (folder / name).touch()
        yield commands


def test_every_command_is_tried() -> None:
    tried = [*COMMANDS, "run"]
    assert [name for name in leaves(main) if not any(f"{each} ".startswith(f"{name} ") for each in tried)] == []


def test_a_command_works_or_one_line_names_its_extra(
    bare: Commands, environment: dict[str, str], start_worker: StartWorker
) -> None:
    start_worker()
    job = bare.run(["submit", "c.jsonl"], environment).out.strip()
    wrong = {}
    for command, extra in COMMANDS.items():
        ended = bare.run(command.replace("JOB", job).split(), environment)
        named = _EXTRA.findall(ended.err)
        if "Traceback" in ended.err or (ended.status, named) != ((1, [extra]) if extra else (0, [])):
            wrong[command] = ended
    assert wrong == {}


def test_a_private_redis_names_its_extra(bare: Commands, environment: dict[str, str]) -> None:
    ended = bare.run(["run", "c.jsonl", "-o", "v.npy"], {**environment, "EMBEDCTL_REDIS_URL": ""})
    assert (ended.status, _EXTRA.findall(ended.err)) == (1, ["local"])
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("group", ["", *_GROUPS, "worker", "up"])
def test_help_needs_no_extra(bare: Commands, environment: dict[str, str], group: str) -> None:
    ended = bare.run([*group.split(), "--help"], environment)
    assert (ended.status, ended.err) == (0, "")
    assert "Usage: embedctl" in ended.out


def test_doctor_says_what_is_not_installed(bare: Commands, environment: dict[str, str]) -> None:
    ended = bare.run(["doctor", "--json"], environment)
    found = {each["subject"]: each for each in json.loads(ended.out)}
    assert "no torch" in found["extra torch"]["found"]
    assert "no h11" in found["extra gateway"]["found"]
    assert (found["packages"]["level"], found["tickets"]["level"]) == ("ok", "ok")


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """Services in an environment without a package that kombu's transport imports."""
    folder = tmp_path_factory.mktemp("broken")
    python = make_environment(folder / "env", "embedctl[gateway,flower,metrics]")
    for link in folder.glob("env/lib/python*/site-packages/packaging*"):
        link.unlink()
    with commands_of(python, folder) as commands:
        yield commands


@pytest.mark.parametrize("service", ["gateway --address 0", "flower --address 0", "worker --class dummy"])
def test_a_service_that_could_send_no_ticket_ends_before_it_says_where_it_is(
    broken: Commands, environment: dict[str, str], broker: Broker, service: str
) -> None:
    ended = broken.run(service.split(), environment)
    assert ended.status == 1
    assert "No module named 'packaging'" in ended.err
    assert "http://" not in ended.err
    assert not list(broker.workers.alive())


def test_doctor_fails_where_no_ticket_can_be_sent(broken: Commands, environment: dict[str, str]) -> None:
    ended = broken.run(["doctor", "--json"], environment)
    found = {each["subject"]: each for each in json.loads(ended.out)}
    assert ended.status == 1
    for subject, said in {"packages": "no packaging", "tickets": "No module named 'packaging'"}.items():
        assert (found[subject]["level"], found[subject]["found"]) == ("fail", said)
        assert "install embedctl again" in found[subject]["remedy"]
