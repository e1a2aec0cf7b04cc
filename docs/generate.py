"""Write the pages that the source already holds: docs/cli.md and docs/settings.md. Run it with `make docs`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner

from embedctl.cli import main as embedctl
from embedctl_bench.__main__ import main as bench
from embedctl_config import errors, settings
from embedctl_config.hardware import DEVICES, PRECISIONS, SHIPPED_CLASSES, HardwareClass, ModelEntry
from embedctl_config.tenants import TenantEntry
from embedctl_gateway.__main__ import main as gateway
from embedctl_workers.backends import BACKENDS
from embedctl_workers.commands.model import main as model
from embedctl_workers.commands.up import main as up
from embedctl_workers.commands.worker import main as worker

DOCS = Path(__file__).parent
#: Commands that are a process of their own, and so a command line of their own.
PROCESSES: dict[str, click.Command] = {"worker": worker, "up": up, "model": model, "bench": bench, "gateway": gateway}
#: Columns of the terminal for which help is printed.
WIDTH = 100

CLI = """\
<!-- Written by `make docs` from the source: changes made here are overwritten. -->

# The command line

A job's id and the data asked for go to standard output; progress, messages and errors go to standard error. On a
terminal, progress is one line that moves; elsewhere, it is a line every 10 s.

If you omit an option, its value comes from the environment variable that its help names. "The setting" in a help text
is one of the [settings](settings.md), which you can also write in a file.

[Corpora](corpora.md) describes the files that `run` and `submit` take.

{commands}
## Exit statuses

{statuses}"""

SETTINGS = """\
<!-- Written by `make docs` from the source: changes made here are overwritten. -->

# Settings

A setting can come from several places. The strongest first:

1. a command's option, or an argument in Python;
2. its environment variable;
3. the project's file: the one named by `EMBEDCTL_CONFIG`, else `embedctl.toml` in the working directory;
4. the user's file: `embedctl/config.toml` in `$XDG_CONFIG_HOME`, by default in `~/.config`;
5. its default.

A command checks all settings when it starts, and one message lists every problem with its source. `embedctl config
show` shows the source of each setting. Some variables share the prefix by chance, such as those that Kubernetes sets
for a service called `embedctl-redis`. They are logged and ignored.

An `embedctl.toml` in the working directory may have come with a repository that you cloned. Unless `EMBEDCTL_CONFIG`
names it, the file may set models, classes and sizes, but a command stops if the file sets any of these: {guarded}. If
the file is yours, name it: `export EMBEDCTL_CONFIG=/path/to/embedctl.toml`.

A password is never sent to a Redis that a stronger source names. For example, `redis_password_file` in your own file
belongs to the `redis_url` in that file, and is ignored if a variable names another Redis. The same is true of
`sentinel_password_file`, and of `api_key_file` with `url`. The reverse is allowed:
`redis_url` may be in a file that everyone can read, and `EMBEDCTL_REDIS_PASSWORD_FILE` in the environment.

`HOST:PORT` has an IPv6 address in brackets, as in `[::1]:8080`. A port alone is one of 127.0.0.1. Port 0 is any free
port.

{scalars}
All producers and workers on one Redis should have the same `lease_s`.

## `[classes.NAME]`: hardware classes

A hardware class is a named way to encode. A table with the name of a shipped class changes that class. A table
with any other name adds a class, with the defaults below.

{classes}
Devices: {devices}. Precisions: {precisions}. Backends: {backends} (`dummy` makes vectors without a model, for tests).

The shipped classes:

{shipped}
## `[models.NAME]`: models

`NAME` is the model's name for jobs, workers and queues; the table says where the model comes from. A worker looks for
the model's source as a folder, then as an installed model package, then in the hub's cache. Without a table, the name
itself is the source. Nothing is downloaded unless it is [told to](models.md#pull-a-model).

{models}
## `[tenants.NAME]`: shares and limits

`NAME` is what `tenant` or `--tenant` says. Tenants whose jobs wait for the same workers have parts of the work, counted
in tokens, that are as their weights. A tenant without a table has weight 1, and one that has nothing waiting takes
nothing away from the others.

Weights and [limits](operations.md#quotas) hold for every program that uses this Redis: workers state those of their
settings in Redis. If the settings of workers differ, the worker that was started last decides. A lower weight in the
settings of a program counts for the jobs that it makes.

{tenants}
## An example

Your own file, or one that `EMBEDCTL_CONFIG` names, may contain:

```toml
redis_url = "redis://queue.example:6379/0"
model = "bge-small"

[models.bge-small]
source = "BAAI/bge-small-en-v1.5"

[classes.cpu]
token_budget = 2048
```
"""


def cli_page() -> str:
    """docs/cli.md."""
    sections = [f"## {name}\n\n```text\n{help_of(name, command)}```\n" for name, command in commands()]
    return CLI.format(commands="\n".join(sections), statuses=table(("status", "meaning"), exit_statuses()))


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command with the words that call it."""
    yield "embedctl", embedctl
    ctx = click.Context(embedctl)
    for name in [*embedctl.commands]:
        command = PROCESSES.get(name) or embedctl.get_command(ctx, name)
        assert command is not None
        yield from _with_inner(f"embedctl {name}", command)


def _with_inner(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        for inner, each in command.commands.items():
            yield from _with_inner(f"{name} {inner}", each)


def help_of(name: str, command: click.Command) -> str:
    """What `--help` prints."""
    # click keeps the option --help with the names that it had in the first context, which a test may have made.
    command._help_option = None
    words = name.split()
    if len(words) > 1 and words[1] in PROCESSES:
        called, program, arguments = PROCESSES[words[1]], " ".join(words[:2]), [*words[2:], "--help"]
    else:
        called, program, arguments = embedctl, words[0], [*words[1:], "--help"]
    return CliRunner().invoke(called, arguments, prog_name=program, terminal_width=WIDTH).output


def exit_statuses() -> Iterator[tuple[str, str]]:
    """Each status, what it means and the errors that end in it."""
    raised: dict[int, list[str]] = {}
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.EmbedctlError):
            raised.setdefault(kind.exit_code, []).append(kind.__name__)
    for status in errors.ExitStatus:
        names = f": {listed(raised[status])}" if status in raised else ""
        yield str(status), status.meaning + names


def settings_page() -> str:
    """docs/settings.md."""
    scalars = [
        (f"`{name}`", f"`{settings.ENV_PREFIX}{name.upper()}`", code(each.default), *_help(each))
        for name, each in settings.SETTINGS.items()
        if "unit" in each.metadata
    ]
    shipped = [
        (f"`{name}`", entry.device, entry.backend, entry.precision, str(entry.prefetch), str(entry.token_budget))
        for name, entry in SHIPPED_CLASSES.items()
    ]
    return SETTINGS.format(
        guarded=listed(name for name, each in settings.SETTINGS.items() if each.metadata.get("guarded")),
        scalars=table(("name", "variable", "default", "unit", "meaning"), scalars),
        classes=fields_table(HardwareClass),
        devices=listed(DEVICES),
        precisions=listed(PRECISIONS),
        backends=listed(BACKENDS),
        shipped=table(("class", "device", "backend", "precision", "prefetch", "token budget"), shipped),
        models=fields_table(ModelEntry),
        tenants=fields_table(TenantEntry),
    )


def _help(setting: dataclasses.Field[Any]) -> tuple[str, str]:
    return setting.metadata["unit"], setting.metadata["help"]


def fields_table(form: type[Any]) -> str:
    """The fields of a dataclass, with their defaults and what its docstring says of them."""
    meanings = dict(re.findall(r"^ +(\w+): (.+)\.$", form.__doc__ or "", re.MULTILINE))
    defaults = form()
    rows = [
        (f"`{each.name}`", code(getattr(defaults, each.name)), meanings[each.name]) for each in dataclasses.fields(form)
    ]
    return table(("key", "default", "meaning"), rows)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    lines = [tuple(head)]
    lines += [tuple("---" for _ in lines[0]), *map(tuple, rows)]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def code(value: object) -> str:
    """A value as code."""
    if value in ("", (), {}):
        return "empty"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def listed(names: Iterable[str]) -> str:
    """Names as code, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


PAGES = {"cli.md": cli_page, "settings.md": settings_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
