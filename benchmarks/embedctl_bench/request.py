"""`embedctl bench request`: infinity's benchmark, ten requests of long texts in flight, through the whole product."""

from __future__ import annotations

import random
from contextlib import suppress

import click

from embedctl_bench.asking import Asked, common, conclude, not_installed
from embedctl_bench.measuring.comparison import COLUMNS, Load, Scene
from embedctl_bench.measuring.contenders import compete
from embedctl_bench.peers.models import Model, describe, measured_model, model_files, slug
from embedctl_bench.peers.registry import INFINITY_SERVER, baselines_for, choose_peers, product_of, servers_of
from embedctl_bench.peers.tuned import Workload
from embedctl_bench.report import Report, Table
from embedctl_bench.texts.words import LONGEST, REQUESTS, SHORTEST, TEXTS, draw_words, request_texts
from embedctl_bench.texts.workloads import describe_workload, make_workload

#: A machine with this number of CPUs runs the whole shape in every round.
_LARGE_MACHINE = 16
_ROUNDS, _QUICK_ROUNDS = 3, 2
#: The most texts of each request that have references. Over HTTP, texts whose vectors are compared.
_MOST_CHECKED, _CHECKED = 26, 64
#: Tokens of single texts, and how often each is asked for in a round.
LENGTHS = (8, 32, 128, 256)
_SINGLES, _QUICK_SINGLES = 40, 5
#: Texts of a larger request, and how many such requests there are in a round.
_TOGETHER, _OF_MANY = 32, 10
#: A single caller has so many times the rounds of other loads: a machine's speed changes within minutes by more than
#: the milliseconds that they tell apart.
_TIMES_ROUNDS = 5
#: Tokens that BERT adds to a text.
_SPECIAL = 2
_CALLERS, _MOST_TEXTS = 64, 8
_WORDS_OF_CALLERS = (10, 30)
_ASKED, _QUICK_ASKED = 512, 64

#: infinity's documentation (version 0.0.25), of bge-small-en-v1.5 on an Intel Cascade Lake: requests of 255 texts per
#: second.
PUBLISHED = {
    "infinity, optimum int8": 0.10,
    "infinity, optimum onnx": 0.08,
    "fastembed, onnx": 0.08,
    "sentence-transformers, torch": 0.04,
    "infinity, torch (marked there as needing revision)": 0.03,
    "text-embeddings-inference, candle": 0.009,
}
_WORKLOAD = (
    f"{REQUESTS} requests in flight at once, each of {TEXTS} texts of {SHORTEST:,}–{LONGEST:,} characters: the shape "
    "of infinity's own benchmark, with other texts. The texts are generated, the same on every machine, and "
    "different in each request. A model that truncates before 512 tokens is set to 512 if it has the positions. "
    "Ours is the whole product: a private Redis, workers, and a client that submits all jobs at once, on the same "
    "CPUs; timed from before the first submit to the last vector stored in Redis. Other systems are called in their "
    "own process without a server: infinity gets all requests in its queue at once; the others have no queue and "
    "get one after the other. A load that is run once has no spread: differences below 10 % say nothing."
)
_HTTP_WORKLOAD = (
    "Every server runs on the same CPUs as the callers, with the same model, and gets each load by turns; the others "
    "are idle meanwhile. A caller has a connection of its own, sends a request to `/v1/embeddings`, and its next one "
    "when that is answered. Vectors come in base64, as OpenAI's clients ask for them; they are read when the time is "
    "taken. The gateway may take ten minutes for an answer; its default is one. Texts are English words drawn at "
    "random, each one token of BERT's."
)
_SERVER_BASE = ((INFINITY_SERVER.name,), "infinity's server")


def long_requests(cpus: int, *, quick: bool, finals: bool = True) -> list[Load]:
    """infinity's benchmark for a number of CPUs: what is run in rounds, and perhaps what is run once in the end, with
    `finals` for ours and the fastest other systems alone."""

    def asked(*sizes: int) -> list[list[str]]:
        return [request_texts(number, sizes[number % len(sizes)]) for number in range(REQUESTS)]

    if quick:
        return [Load.of("requests of 3 texts", asked(3), _QUICK_ROUNDS)]
    if cpus >= _LARGE_MACHINE:
        return [Load.of("the whole shape", asked(TEXTS), _ROUNDS)]
    # 255 texts in all: 25 and 26 in alternation.
    tenth = Load.of("a tenth of the shape", asked(25, 26), _ROUNDS)
    return [tenth, Load.of("the whole shape", asked(TEXTS), 1, finals=finals)]


def http_requests(cpus: int, *, quick: bool) -> list[Load]:
    """The loads over HTTP: single texts, requests of 32, many callers of a few texts, and the requests above."""
    rounds, singles = (_QUICK_ROUNDS, _QUICK_SINGLES) if quick else (_ROUNDS * _TIMES_ROUNDS, _SINGLES)
    found = []
    for tokens in LENGTHS:
        draw = random.Random(tokens)
        texts = [[draw_words(draw, tokens - _SPECIAL)] for _ in range(singles)]
        found.append(Load.of(f"one text of {tokens} tokens", texts, rounds, callers=1))
    draw = random.Random(_TOGETHER)
    together = [
        [draw_words(draw, draw.randint(*_WORDS_OF_CALLERS)) for _ in range(_TOGETHER)]
        for _ in range(_QUICK_SINGLES if quick else _OF_MANY)
    ]
    found.append(Load.of(f"one request of {_TOGETHER} texts", together, rounds, callers=1))
    draw = random.Random(0)
    several = [
        [draw_words(draw, draw.randint(*_WORDS_OF_CALLERS)) for _ in range(draw.randint(1, _MOST_TEXTS))]
        for _ in range(_QUICK_ASKED if quick else _ASKED)
    ]
    name = f"{_CALLERS} callers of 1 to {_MOST_TEXTS} texts"
    found.append(Load.of(name, several, _QUICK_ROUNDS if quick else _ROUNDS, callers=_CALLERS))
    return [*found, *long_requests(cpus, quick=quick, finals=False)]


@click.command("request")
@common
@click.option(
    "--http",
    is_flag=True,
    envvar="EMBEDCTL_HTTP",
    show_envvar=True,
    help="Measure `embedctl gateway` over HTTP instead, also with single texts and with many callers; "
    "`--peers infinity` measures infinity's server beside it.",
)
def command(asked: Asked, http: bool) -> None:
    """Ten concurrent requests of 255 long texts: infinity's benchmark.

    Times each run from submit until the last vector is stored. Each class runs embedctl end to end: a private Redis,
    workers, and a client with ten threads. Other systems are called as their users call them. All systems encode the
    same texts on the same CPUs, in turn. On fewer than 16 CPUs, every system encodes a tenth of the texts three
    times; embedctl and the fastest other systems also encode all texts once.
    """
    (_over_http if http else _through_the_product)(asked)


def _through_the_product(asked: Asked) -> None:
    loads = long_requests(len(asked.cpus), quick=asked.quick)
    peers, lacking = choose_peers(asked.peers, asked.place)
    products = [product_of(name, asked.settings, len(asked.cpus)) for name in asked.classes]
    # Unless no other system is wanted.
    systems = [*products, *([] if asked.peers == () else baselines_for(products, peers)), *peers]
    session = asked.session("request", len(asked.models) * (len(systems) + sum(each.rounds for each in loads)))
    # Requests of 25 and of 26 texts take turns in a tenth of the shape.
    firsts = [each[: _MOST_CHECKED - (at % 2 == 0)] for at, each in enumerate(loads[0].asked)]
    texts = [text for each in firsts for text in each]
    warm_up = [each[:3] for each in firsts]
    scenes: list[Scene] = []
    with suppress(KeyboardInterrupt), session:
        for name in asked.models:
            model = measured_model(name, asked.settings, asked.place)
            workload = Workload("requests", texts, model.lengths(texts), asked.settings.chunk_size)
            shown = f"{describe(name)}; {describe_workload(workload, model.max_tokens)}"
            scenes.append(Scene(name, model, shown, loads))
            request = len(texts) // REQUESTS
            ground = asked.ground(model.name, model, workload, session, request=request, warm_up=warm_up)
            compete(scenes[-1], systems, ground)
    report = Report(
        f"Ten requests of {TEXTS} long texts in flight",
        _WORKLOAD,
        tables=[_published()],
        notes=not_installed(lacking),
    )
    conclude(asked, session, scenes, report)


def _published() -> Table:
    rows = [
        {"system": system, "requests_per_s": rate, "texts_per_s": TEXTS * rate, "_published": True}
        for system, rate in PUBLISHED.items()
    ]
    note = (
        "bge-small-en-v1.5 on another machine (GCP g2-standard-16, Intel Cascade Lake), and through an HTTP server: no "
        "figure of yours can be divided by one of these."
    )
    return Table("published", "Published, by infinity 0.0.25", COLUMNS, rows, note)


def _over_http(asked: Asked) -> None:
    loads = http_requests(len(asked.cpus), quick=asked.quick)
    # infinity's server only if it is asked for, since it is installed first.
    others = [INFINITY_SERVER] if asked.peers and {"all", "infinity", INFINITY_SERVER.name} & {*asked.peers} else []
    cells = [(name, hardware) for name in asked.models for hardware in asked.classes]
    session = asked.session("request-http", len(cells) * (2 + len(others) + sum(each.rounds for each in loads)))
    # The first requests of a process take longer, and few would decide a percentile.
    warm_up = [each for load in loads[: len(LENGTHS)] for each in load.asked]
    scenes: list[Scene] = []
    with suppress(KeyboardInterrupt), session:
        for name, hardware in cells:
            model = Model.in_folder(slug(name), model_files(name, asked.settings).folder)
            workload = make_workload("W1", _CHECKED, model, asked.place)
            scenes.append(Scene(f"{name}, class {hardware}", model, describe(name), loads, _SERVER_BASE))
            ground = asked.ground(f"{name}/{hardware}", model, workload, session, warm_up=warm_up)
            systems = [*servers_of(hardware, asked.settings), *others]
            compete(scenes[-1], systems, ground)
    conclude(asked, session, scenes, Report("Requests over HTTP", _HTTP_WORKLOAD))
