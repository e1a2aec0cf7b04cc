"""`embedctl model quality`: what smaller vectors cost in ranking."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click

from embedctl_config.command_group import option
from embedctl_config.errors import ModelError, SettingsError
from embedctl_config.model_names import not_matryoshka
from embedctl_config.outputs import Output, not_given, outputs_of
from embedctl_workers.commands.options import class_option, cpus_option, json_option, log_plainly, settings_and_class
from embedctl_workers.machine import devices
from embedctl_workers.tables import table

#: `embedctl.destinations.numbers.Dtype`, which can't be imported before pinning.
_DTYPES = ("float32", "float16", "int8", "binary")
#: The columns, and how their values are written.
_FORMS = {"vectors": "", "dims": ",", "dtype": "", "bytes": ",.0f", "overlap@10": ".3f", "nDCG@10": ".3f"}


@click.command()
@click.argument("model")
@option("--vectors", metavar="KINDS", help="Some of dense, sparse and multi, such as dense,sparse. Default: MODEL's.")
@option("--dims", type=click.IntRange(1), multiple=True, metavar="N", help="As of a job; repeatable. Default: all.")
@option("--dtype", type=click.Choice(_DTYPES), multiple=True, help="As of a job; repeatable. Default: each.")
@class_option("cpu")
@cpus_option
@json_option
def quality(
    model: str,
    vectors: str | None,
    dims: Sequence[int],
    dtype: Sequence[str],
    hardware: str | None,
    cpus: str | None,
    *,
    as_json: bool,
) -> None:
    """Measure what smaller vectors of MODEL cost in ranking.

    Ranks 120 passages for each of 30 queries by MODEL's vectors as they would be stored, dense ones cut to --dims and
    in each --dtype. Prints the bytes of a passage's vectors, and how far the best ten are those by whole float32
    vectors in fp32. Sparse vectors are stored as float32 alone, and multi-vectors as float32 or float16.
    """
    log_plainly()
    settings, name = settings_and_class(hardware, "cpu")
    entry = settings.hardware_class(name)
    if entry.device != "cpu":
        raise SettingsError(f"class {name} does not run on CPUs: name one that does")
    pinned = devices.pin(cpus)
    # Only now: these import libraries that size their thread pools when they are loaded.
    from embedctl_workers.accuracy.quality import quality as measured
    from embedctl_workers.encoding.known_good import load_encoder
    from embedctl_workers.machine.host import Host
    from embedctl_workers.models.cache import cache_folder

    host = Host(pinned.threads, cache_folder(settings), places=pinned.places)
    encoder = load_encoder(settings, entry, model, host)
    backend = encoder.backend
    if backend.reference is None:
        raise ModelError(f"the backend {entry.backend!r} of class {name} runs no model: nothing is ranked")
    outputs = backend.outputs if vectors is None else outputs_of(vectors)
    if why := not_given(outputs, backend.outputs, model):
        raise SettingsError(why)
    sizes = {each: dims or [backend.dim] if each is Output.DENSE else [backend.widths[each]] for each in outputs}
    rows = list(measured(encoder, host, entry.precision, sizes, dtype or _DTYPES))
    if as_json:
        click.echo(json.dumps(rows))
        return
    cells = [[format(value, _FORMS[head]) for head, value in row.items()] for row in rows]
    click.echo("\n".join(table([list(_FORMS), *cells], figures=(1, 3, 4, 5))))
    if dims and not encoder.matryoshka:
        click.echo(not_matryoshka(model), err=True)
