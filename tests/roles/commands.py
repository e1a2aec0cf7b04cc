"""Every command where no extra is installed: it does its work, or one line names the extra that it lacks."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from embedctl.cli import main
from embedctl_bench.__main__ import main as bench
from embedctl_gateway.__main__ import main as gateway
from embedctl_workers.commands.model import main as model

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
    "plan c.jsonl": "",
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
    "model quality all-MiniLM-L6-v2 --class cpu": "torch",
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
    "repair": "",
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


def untried() -> list[str]:
    """The commands that are not in the table."""
    tried = [*COMMANDS, "run"]
    return [name for name in leaves(main) if not any(f"{each} ".startswith(f"{name} ") for each in tried)]


def wrong(embedctl: Path, job: str, folder: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """What the commands said that did something else, in a folder with `c.jsonl`, with no program on PATH."""
    (folder / "c.parquet").touch()
    alone = {**environment, "PATH": str(folder), "HF_HUB_OFFLINE": "1"}
    for command, extra in {**COMMANDS, "run c.jsonl -o v.npy": "local"}.items():
        words = command.replace("JOB", job).split()
        own = {**alone, "EMBEDCTL_REDIS_URL": ""} if words[0] == "run" else alone
        done = subprocess.run([embedctl, *words], cwd=folder, env=own, capture_output=True, text=True, timeout=300)
        ended = done.returncode, _EXTRA.findall(done.stderr)
        if "Traceback" in done.stderr or ended != ((1, [extra]) if extra else (0, [])):
            yield f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
