"""`embedctl plan` beside what a job really took."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from embedctl import Job
from embedctl.jobs.plan import Load, Plan, Rate, Room
from tests.support.here import Here
from tests.support.passages import passages

PLANNED = """
[classes.planned]
backend = "dummy"
token_budget = 1024
options = {dim = 384, seconds_per_batch = 0.2}
"""
#: A plan is no further from what a job took than this.
NEAR = 0.2


def test_a_plan_is_arithmetic_over_what_was_measured() -> None:
    plan = Plan(Load(20_000_000, 42.0, 170.0), Rate(10_000.0, "by hand"), Room(1536, 10**8, 10**9), 8 * 3600, 0.5)
    assert plan.work_s == 84_000
    assert plan.workers == 3
    assert plan.results_bytes == 20_000_000 * 1546
    assert plan.memory_bytes == plan.results_bytes
    of_long_texts = replace(plan, load=Load(1000, 1.0, 10**6), room=Room(1536, 10**8, 10**9))
    assert of_long_texts.memory_bytes == 10**8 + 0.9 * of_long_texts.results_bytes
    assert plan.drained_memory_bytes == 10**9 + 10**8
    assert plan.network_bytes == 2 * 20_000_000 * (170 + 1546)
    assert plan.cost == pytest.approx(84_000 / 3600 * 0.5)
    assert "3, to end within 8.0 h" in plan.describe()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--records", "20M"], "Name a part of the corpus, or give --records and --tokens."),
        (["--records", "many", "--tokens", "3"], "'many' is no number of records, such as 50000, 300k or 20M"),
        (["--records", "1k", "--tokens", "3", "--per", "fortnight"], "'fortnight' is not a number and a unit"),
        (["nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_what_a_plan_lacks_is_said(here: Here, arguments: list[str], words: str) -> None:
    assert words in here.embedctl("plan", *arguments, status=2).stderr


@pytest.mark.slow
def test_a_plan_is_near_what_a_job_took(here: Here) -> None:
    """The backend sleeps for most of the time, so the machine's other work changes little."""
    texts = passages(2_000)
    rows = [{"id": f"passage-{at}", "text": text, "note": "n" * 900} for at, text in enumerate(texts)]
    (here.folder / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Path(here.environment["EMBEDCTL_CONFIG"]).open("a") as config:
        config.write(PLANNED)
    here.start_worker("planned")
    command = ("c.jsonl", "--class", "planned", "--model", "dummy", "--keep", "note")
    here.embedctl("submit", *command, "--limit", "500", "--wait", status=0)  # the worker measures itself
    before = here.raw.info()
    job_id = here.embedctl("submit", *command, "-o", "v.parquet", status=0).stdout.strip()
    after, status = here.raw.info(), Job(job_id, here.broker).status()

    tokens = status.tokens / status.records  # a token of this backend is a word, which a plan does not know
    made = here.embedctl("plan", *command, "--tokens", str(tokens), "--per", "12h", "--json", status=0)
    plan = json.loads(made.stdout)
    assert (plan["records"], plan["tokens"], plan["workers"]) == (len(texts), status.tokens, 1)
    assert status.started_at
    assert status.ended_at
    took_s = (status.ended_at - status.started_at).total_seconds()
    assert plan["worker_hours"] * 3600 == pytest.approx(took_s, rel=NEAR)
    assert plan["redis_bytes"] == pytest.approx(after["used_memory"] - before["used_memory"], rel=NEAR)
    moved = [after[name] - before[name] for name in ("total_net_input_bytes", "total_net_output_bytes")]
    assert plan["network_bytes"] == pytest.approx(sum(moved), rel=NEAR)
