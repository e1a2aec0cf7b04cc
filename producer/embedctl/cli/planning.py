"""`embedctl plan`: how many workers, how much memory and how long a corpus takes, before there is a job."""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import get_args

import click

from embedctl.cli.options import duration, json_option, option, vectors_option
from embedctl.common.processes import running
from embedctl.corpus.digests import with_digests
from embedctl.corpus.kept import parse_keep
from embedctl.corpus.reading import open_corpus
from embedctl.corpus.records import Record
from embedctl.corpus.rows import Rows, records_of
from embedctl.corpus.template import parse_template
from embedctl.jobs.enqueue import as_asked
from embedctl.jobs.estimate import Estimate, estimate, local_estimate
from embedctl.jobs.options import Long, SubmitOptions
from embedctl.jobs.plan import Load, Plan, Rate, Room
from embedctl.queueing.broker import HIGH_WATER_BYTES, RESULTS_HIGH_WATER_BYTES, Broker
from embedctl.queueing.chunk_sizes import BYTES_PER_TOKEN
from embedctl.queueing.routing import local_class
from embedctl_config.errors import ModelError
from embedctl_config.loading import load_settings
from embedctl_config.outputs import Output
from embedctl_config.record_ids import to_wire
from embedctl_config.settings import Settings

_MULTIPLES = {"": 1, "k": 1000, "M": 1000**2, "G": 1000**3}
_UNKNOWN = (
    "the dimensions of {} are unknown: no live worker serves it, and it is not here; or it gives no such vectors: name "
    "those that it gives as --vectors"
)
_SPARSE = (
    "only the model can count the weights of sparse vectors: plan without them, run a part of the corpus, and add the "
    "bytes of its file"
)
#: Of a text in the place of a sample.
_MOST_TOKENS = 32_768
_PERIODS = {"night": "8h", "day": "24h", "week": "7d"}


def _count(text: str) -> int:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kMG]?)", text)
    if found is None or not float(found[1]):
        raise click.BadParameter(f"{text!r} is no number of records, such as 50000, 300k or 20M")
    return round(float(found[1]) * _MULTIPLES[found[2]])


def _period(text: str) -> float:
    seconds = duration(_PERIODS.get(text, text)).total_seconds()
    if not seconds:
        raise click.BadParameter("nothing ends within no time")
    return seconds


@click.command()
@click.argument("sample", metavar="[SAMPLE]...", nargs=-1, type=click.Path())
@option("--records", type=_count, metavar="N", help="How many records, such as 20M. Default: those of SAMPLE.")
@option("--tokens", type=click.FloatRange(min=1), metavar="N", help="The mean tokens of a record. Default: of SAMPLE.")
@option("--text-field", default="text", show_default=True, help="The field of SAMPLE with the text.")
@option("--template", metavar="TEXT", help="Makes each text of several fields, as for `embedctl run`.")
@option("--keep", metavar="FIELD,…", help="Fields that come out beside the vectors, as for `embedctl run`.")
@option(
    "--long",
    type=click.Choice(get_args(Long)),
    default="cut",
    show_default=True,
    help="What becomes of long texts, as for `embedctl run`. With split, the plan counts their pieces.",
)
@vectors_option
@option("--model", help="The model. Default: the setting.")
@option("--class", "hardware", help="The hardware class. Default: the setting, or cpu if that is auto.")
@option(
    "--per",
    "within_s",
    type=_period,
    default="night",
    metavar="TIME",
    show_default=True,
    help="When it is to end: night (8 hours), day, week, or a time such as 90m or 12h.",
)
@option("--price", type=click.FloatRange(min=0), help="Of one worker for an hour, in any currency.")
@json_option
def plan(
    sample: tuple[str, ...],
    *,
    records: int | None,
    tokens: float | None,
    text_field: str,
    template: str | None,
    keep: str | None,
    long: Long,
    vectors: str | None,
    model: str | None,
    hardware: str | None,
    within_s: float,
    price: float | None,
    as_json: bool,
) -> None:
    """Say how many workers, how much Redis memory and how many hours a corpus takes.

    The rate of a worker is that of the live workers that serve the model in this class. If none has told one, it is
    measured here, with all CPUs, for half a minute. SAMPLE is a part of the corpus, or all of it: its texts are
    counted, and nothing is queued. Without it, --records and --tokens are needed.

    docs/capacity.md has the formulas.
    """
    settings = load_settings()
    if not sample and (records is None or tokens is None):
        raise click.UsageError("Name a part of the corpus, or give --records and --tokens.")
    hardware = local_class(settings, hardware)
    options = SubmitOptions.of(
        model=model or settings.model, hardware=hardware, long=long if sample else "cut", vectors=vectors
    )
    rows = Rows(settings.max_text_bytes)
    if sample:
        rows = Rows(settings.max_text_bytes, text_field, "id", parse_keep(keep), parse_template(template))
    broker = Broker.shared(settings) if settings.redis_url else None
    counted, read, ids_bytes = _counted(settings, broker, sample or _text_of(tokens or 1), rows, options)
    total = round((records or read) * counted.records / read)
    mean = tokens or counted.tokens / counted.records
    size = counted.text_bytes / counted.records if sample else mean * BYTES_PER_TOKEN
    room = _room(broker, counted, options)
    rate = _live_rate(counted) or _measured_rate(options, mean)
    load = Load(total, mean, size, (counted.kept_bytes + ids_bytes) / counted.records)
    made = Plan(load, rate, room, within_s, price)
    click.echo(json.dumps(made.facts()) if as_json else made.describe())


def _text_of(tokens: float) -> str:
    """A text of about so many tokens: a multi-vector has a vector for each."""
    return "a" * round(min(tokens, _MOST_TOKENS) * BYTES_PER_TOKEN)


def _room(broker: Broker | None, counted: Estimate, options: SubmitOptions) -> Room:
    if counted.vector_bytes is None:
        raise ModelError(_SPARSE if Output.SPARSE in options.outputs else _UNKNOWN.format(options.model))
    vector_bytes = counted.vector_bytes // counted.records
    if broker is None:
        return Room(vector_bytes, HIGH_WATER_BYTES, RESULTS_HIGH_WATER_BYTES)
    return Room(vector_bytes, broker.high_water(), broker.results_high_water())


def _counted(
    settings: Settings, broker: Broker | None, sample: Sequence[str] | str, rows: Rows, options: SubmitOptions
) -> tuple[Estimate, int, int]:
    """What is known of the sample, or of one text in its place, how many records it has (an estimate counts their
    pieces), and the bytes of the ids. The digests that `run` and `submit` keep of all texts count as kept."""
    read, ids = itertools.count(), 0

    def with_ids_counted(records: Iterator[Record]) -> Iterator[Record]:
        nonlocal ids
        for record in records:
            ids += 0 if record.id is None else len(to_wire(record.id))
            yield record

    if isinstance(sample, str):
        records = records_of([sample], rows)
    else:
        corpus = open_corpus(*sample, rows=rows)
        corpus.check()
        records = corpus.records()
    asked = as_asked((record for record, _ in zip(records, read, strict=False)), rows, options, settings)
    texts = with_digests(with_ids_counted(asked))
    estimated = local_estimate(settings, texts, options) if broker is None else estimate(broker, texts, options)
    return estimated, next(read), ids


def _live_rate(counted: Estimate) -> Rate | None:
    if not (counted.seconds and counted.workers):
        return None
    together = counted.tokens / counted.seconds
    return Rate(together / counted.workers, f"as {counted.workers} live ones measured it", counted.workers)


def _measured_rate(options: SubmitOptions, tokens: float) -> Rate:
    """The rate of one worker on this machine, with texts of about this length; the same measurement as `embedctl model
    verify`. ModelError if it fails."""
    click.echo("No live worker has told its rate: it is measured here, for half a minute", err=True)
    command = ["-m", "embedctl_workers.commands.model", "verify", str(options.model), "--json"]
    command += ["--class", str(options.hardware)]
    with running([sys.executable, *command], stdout=subprocess.PIPE) as process:
        said, _ = process.communicate()
    speed = json.loads(said).get("speed") if said else None
    if not speed:
        raise ModelError(f"the rate of {options.model} can't be measured here: `embedctl model verify` says why")
    nearest = min(speed["rates"], key=lambda each: abs(math.log(each["tokens_per_text"] / tokens)))
    return Rate(nearest["tokens_per_s"]["median"], "measured here")
