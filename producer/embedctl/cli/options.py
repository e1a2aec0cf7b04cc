"""Options that several commands share. Every option has an `EMBEDCTL_*` variable of the same name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from embedctl import corpus, output
from embedctl.cli.completion import complete_job, complete_model
from embedctl.drain.places import place_of
from embedctl_config import tenants
from embedctl_config.errors import SettingsError
from embedctl_config.hardware import PRECISIONS
from embedctl_config.loading import is_foreign
from embedctl_config.settings import ENV_PREFIX, Settings

_SETTINGS = frozenset(each.name for each in dataclasses.fields(Settings))

F = TypeVar("F", bound=Callable[..., Any])


def option(*names: str, **attributes: Any) -> Callable[[F], F]:
    """A click option with its variable: the setting's if its parameter has a setting's name, else the flag's own."""
    flag = names[0].partition("/")[0].removeprefix("--").replace("-", "_")
    name = names[-1] if names[-1] in _SETTINGS else flag
    return click.option(*names, cls=_Option, envvar=ENV_PREFIX + name.upper(), show_envvar=True, **attributes)


class _Option(click.Option):
    """Ignores a variable that has the same name by chance, such as a variable that Kubernetes sets for a service."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        value = super().resolve_envvar_value(ctx)
        return None if value is not None and is_foreign(str(self.envvar), value) else value


class _Output(click.Path):
    """A path for vectors: a Place for parts if it ends in a slash or is a URL, else a Path."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and (value.endswith("/") or "://" in value):
            return place_of(value)
        return super().convert(value, param, ctx)


def together(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Several decorators as one, applied so that help lists them in this order."""

    def decorate(command: F) -> F:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


job_argument = click.argument("job_id", metavar="JOB", shell_complete=complete_job)
no_clobber_option = option("--no-clobber", is_flag=True, help="Fail at once if a file to write exists already.")
json_option = option("--json", "as_json", is_flag=True, help="Print one JSON value.")
quiet_option = option("--quiet", "-q", is_flag=True, help="Show no progress.")
cpus_option = option("--cpus", help="CPUs for the worker, such as 0-3. Default: all.")
model_option = option(
    "--model",
    shell_complete=complete_model,
    help="The name under which workers serve the model. Default: the setting.",
)


def _tenant(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse a wrong name before a model is loaded."""
    if value is not None and (wrong := tenants.check_tenant(value)):
        raise SettingsError(wrong)
    return value


def output_option(**attributes: Any) -> Callable[[F], F]:
    """`--output FILE`; the file's name gives the format. A name that ends in a slash is a folder for parts."""
    return option(
        "--output",
        "-o",
        type=_Output(path_type=Path, dir_okay=False, allow_dash=True),
        help=f"The file for the vectors, in the format of its suffix: .{', .'.join(output.FORMATS)}; or - for standard "
        "output (jsonl); or DIR/ or s3://BUCKET/PREFIX/, for parts; the "
        "vectors are then no longer in Redis.",
        **attributes,
    )


one_file_option = option(
    "--one-file",
    is_flag=True,
    help="Of a batch file, write failed requests to the same file. Default: to NAME.errors.jsonl.",
)
numbers_options = together(
    option(
        "--output-type",
        type=click.Choice([str(kind) for kind in output.OutputType]),
        help="The type of the numbers in .npy, .parquet and parts. ubinary: a bit for each component, whether it is "
        "above 0. Default: float32, or that of the job's parts.",
    ),
    option(
        "--ranges",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="For int8: a .npy with the lowest and the highest value of each component (2 × dimensions). Default: "
        "those of the job's parts, or of the first 100,000 records.",
    ),
)


def chosen_numbers(output_type: str | None, ranges: Path | None) -> output.Numbers | None:
    """How vectors are stored, from :data:`numbers_options`; None if that is left open.

    Raises:
        click.UsageError: there are ranges, and the type has none.
        SettingsError: the ranges can't be read.
    """
    if ranges is not None and output_type != output.OutputType.INT8:
        raise click.UsageError("--ranges is for --output-type int8")
    if output_type is None:
        return None
    return output.Numbers(output.OutputType(output_type), None if ranges is None else output.load_ranges(ranges))


#: Of `run` and `submit`: vectors that need not be encoded.
changes_options = together(
    option(
        "--since",
        metavar="FILE|DIR",
        help="An earlier output (.parquet, .npy or a folder of parts). Vectors of its texts are copied; only new "
        "and changed texts are encoded. It may be the .parquet of --output. With --to beside --output, the table gets "
        "what is new and changed.",
    ),
    option(
        "--cache",
        metavar="FILE",
        help="A file, or sqlite:///FILE, of vectors by text: what it has is not encoded, and what is encoded is added.",
    ),
    option(
        "--cache-precision",
        type=click.Choice(["exact", "at-least"]),
        default="exact",
        show_default=True,
        help="at-least: the cache may also answer with vectors of a better precision, such as fp32 for fp16.",
    ),
    option(
        "--digests",
        is_flag=True,
        help="Write the SHA-256 of each text beside its vector, which --since needs next time. Implied by --since and "
        "--cache.",
    ),
    option("--force", is_flag=True, help="Encode everything, whatever --since and --cache have."),
    option(
        "--delete-missing",
        is_flag=True,
        help="With --since and --to: delete the records from the table that are no longer in the corpus.",
    ),
)

corpus_options = together(
    click.argument("corpus_paths", metavar="CORPUS...", type=click.Path(allow_dash=True), nargs=-1),
    # Without a variable, like the argument.
    click.option(
        "--input-file",
        "-i",
        "input_files",
        metavar="CORPUS",
        type=click.Path(allow_dash=True),
        multiple=True,
        help="The same as CORPUS; the flag of `vllm run-batch`.",
    ),
    option(
        "--format",
        type=click.Choice([*corpus.FORMATS, corpus.BATCH_FORMAT]),
        help="The format of all files. Default: from each file's name; jsonl for standard input. A jsonl file whose "
        "first line has a custom_id and a body is an OpenAI batch file.",
    ),
    option(
        "--text-field",
        default="text",
        show_default=True,
        help="The field that holds a record's text; body.input is the field input of the object body.",
    ),
    option(
        "--id-field", default="id", show_default=True, help="The field that holds a record's id, named in the same way."
    ),
    option(
        "--keep",
        metavar="FIELD,…",
        help="Fields of the corpus that come out beside the vectors, in .jsonl and .parquet. A field that a record "
        "lacks is null. At most 32 fields, and 64 KiB in each record.",
    ),
    option(
        "--unique-ids/--no-unique-ids",
        default=None,
        help="Refuse a corpus in which an id occurs twice. Default: only for batch files.",
    ),
    option("--skip-bad-lines", is_flag=True, help="Skip lines that are not records, and list them on stderr."),
    # Without a variable: one that is set for `embedctl list` must not cut a corpus.
    click.option("--limit", type=click.IntRange(1), metavar="N", help="Take only the first N records. Default: all."),
    model_option,
    option("--precision", type=click.Choice(PRECISIONS), help="The precision that the vectors must have."),
    option("--prompt", help="Text to put before the text of every record. Default: the model's own prompt."),
    option(
        "--prompt-name",
        metavar="NAME",
        help="One of the model's own prompts to put there instead, such as query; `embedctl model show` lists them.",
    ),
    option(
        "--truncation",
        type=click.Choice(["truncate", "error", "mean"]),
        default="truncate",
        show_default=True,
        help="What to do with texts that are too long for the model: encode the first tokens, fail the record, or "
        "encode the whole text in windows and average them.",
    ),
    option(
        "--truncation-side",
        type=click.Choice(["left", "right"]),
        help="The end that a text loses which is too long for the model. Default: as its tokenizer says.",
    ),
    option("--normalize/--no-normalize", default=True, show_default=True, help="Scale vectors to unit length."),
    option(
        "--dimensions",
        type=click.IntRange(1),
        metavar="N",
        help="Keep the first N components of every vector, for models trained for that (Matryoshka). Default: all.",
    ),
    option(
        "--chunk-size", type=click.IntRange(1), help="The maximum number of records in a chunk. Default: the setting."
    ),
    option("--max-errors", metavar="N|N%", help="End the job once more records than this have failed."),
    option(
        "--tenant",
        callback=_tenant,
        help="Whom the job belongs to. Tenants that wait for the same workers take turns. Default: the setting.",
    ),
    option(
        "--lane",
        type=click.Choice(tenants.LANES),
        help="interactive: somebody waits for the vectors; background: only while nothing else waits. Default: normal.",
    ),
    quiet_option,
)
