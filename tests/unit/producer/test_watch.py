"""The overview as it is drawn, from made-up facts; and the thread that looks while it is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.cells import cell_len

from embedctl.common import rates
from embedctl.common.rates import Rate
from embedctl.store import GoneWorker, JobStatus, ServedModel, Starting, WorkerRow
from embedctl.terminal.drawing import overview_lines
from embedctl.terminal.watch import Feed
from embedctl.waiting.overview import JobPace, Overview, QueueState, WorkerState
from embedctl_config.errors import BrokerUnavailable, JobNotFound
from tests.support.jobs import status_of
from tests.support.waiting import eventually

NOW = datetime(2026, 11, 21, 16, 3, 12, tzinfo=UTC)
NOW_MS = int(NOW.timestamp() * 1000)
JOB = "20261121-073032-d974cc1efb"
TERMINALS = [(80, 22), (140, 39), (50, 10), (20, 5)]


def worker(number: int = 0, *models: str, hardware: str = "cpu", host: str = "node", **changes: Any) -> WorkerRow:
    served = {model: ServedModel("f" * 64, 384, 18_204.0, "packed", "", 1_204.0, 0.12) for model in models or ("mini",)}
    plain: dict[str, Any] = {
        "instance": f"i{number}",
        "name": f"{hardware}:{number}@{host}",
        "pid": 1,
        "host": host,
        "hardware": hardware,
        "backend": "torch",
        "precision": "fp32",
        "cpus": str(number),
        "threads": 1,
        "models": served,
        "holding": ((JOB, 12), (JOB, 13)),
        "progressed_ms": NOW_MS - 3_000,
        "device": f"cpu {number}",
    }
    return WorkerRow(**{**plain, **changes})


def busy(row: WorkerRow) -> WorkerState:
    return WorkerState(row, next(iter(row.models.values())))


def hung(number: int = 0) -> WorkerState:
    return WorkerState(worker(number, quiet_s=34.0), None)


def gone(number: int = 0, how: str = "no word from it") -> GoneWorker:
    return GoneWorker(worker(number), 35.0, how)


def job(job_id: str = JOB, **facts: Any) -> JobStatus:
    return status_of(job_id, NOW_MS, **{"started_ms": NOW_MS - 50_000, "records": 6_000, "done": 3_000, **facts})


def pace(status: JobStatus, records_per_s: float | None = 1_000.0) -> JobPace:
    left = (status.records - status.done) / records_per_s if records_per_s and not status.state.ended else None
    return JobPace(status, records_per_s, 15_000.0, left)


def overview(
    workers: Sequence[WorkerState] = (),
    *,
    gone: Sequence[GoneWorker] = (),
    queues: Sequence[QueueState] = (),
    active: Sequence[JobPace] = (),
    active_count: int | None = None,
    ended: Sequence[JobPace] = (),
) -> Overview:
    count = len(active) if active_count is None else active_count
    return Overview(NOW, tuple(workers), tuple(gone), tuple(queues), tuple(active), count, tuple(ended))


def shown(seen: Overview, width: int | None = 80, height: int | None = None) -> list[str]:
    return [line.plain.rstrip() for line in overview_lines(seen, width, height)]


def line_with(lines: Sequence[str], words: str) -> str:
    (found,) = [line for line in lines if words in line]
    return found


def a_lot() -> Overview:
    long = "a-model-of-somebody/with-a-name-that-is-longer-than-any-column-has-room-for"
    workers = [busy(worker(at, host=f"node-{at % 7}")) for at in range(300)]
    workers += [hung(300), busy(worker(301, long, "another", hardware="gpu-of-my-own", host="host." * 12))]
    jobs = [pace(job(f"20261121-073032-{at:010x}", trouble="x" * 200 if at % 3 else "")) for at in range(200)]
    queues = [QueueState(f"class-{at}", long, 10_000_000, None, at % 2) for at in range(40)]
    return overview(workers, gone=[gone(400, "y" * 300)], queues=queues, active=jobs, active_count=1_234)


def everything_once() -> Overview:
    return overview(
        [busy(worker(0)), WorkerState(worker(1, holding=(), progressed_ms=0), None), hung(2)],
        gone=[gone(3)],
        queues=[QueueState("cpu", "mini", 24, 12.3, 3), QueueState("gpu", "mini", 8, None, 0)],
        active=[pace(job())],
        ended=[pace(job("20261121-070000-0000000001", state="completed", done=6_000, ended_ms=NOW_MS - 12_000))],
    )


@pytest.mark.parametrize(("width", "height"), TERMINALS)
@pytest.mark.parametrize("seen", [overview(), everything_once(), a_lot()], ids=["nothing", "some", "a lot"])
def test_nothing_is_wider_or_higher_than_the_terminal(seen: Overview, width: int, height: int) -> None:
    lines = overview_lines(seen, width, height)
    assert len(lines) <= height
    assert max(cell_len(line.plain) for line in lines) <= width
    assert "\n" not in "".join(line.plain for line in lines)


def test_workers_that_are_not_ready_are_shown_with_what_they_do() -> None:
    def starting(count: int) -> tuple[Starting, ...]:
        of_class = ("cpu", ["mini"], "loading mini", NOW_MS - 4_000, NOW_MS + 16_000)
        return tuple(Starting(f"cpu:{at}@node", *of_class) for at in range(count))

    empty = replace(overview(queues=[QueueState("cpu", "mini", 24, 1.0, 0)]), starting=starting(1))
    lines = shown(empty)
    assert lines[0].startswith("workers 0 (1 not ready)")
    assert line_with(lines, "cpu mini") == "cpu mini · 0 live"
    assert line_with(lines, "cpu:0@").strip() == "cpu:0@node  loading mini, about 16 s left; not ready for 4 s"
    assert "start" not in "".join(lines), "one is being started"
    beside = shown(replace(everything_once(), starting=starting(6)))
    assert line_with(beside, "cpu mini") == "cpu mini · 3 live: 1 busy, 1 hung, 1 idle · packed"
    assert "… and 3 more that are not ready" in line_with(beside, "more")


def test_a_full_redis_does_not_make_sound_workers_gone() -> None:
    seen = overview(gone=[gone(3), gone(4, "killed by SIGKILL")], queues=[QueueState("cpu", "mini", 24, 1.0, 0)])
    lines = shown(replace(seen, full_bytes=(2_000, 1_000)), None)
    assert lines[0].startswith("Redis is full, 2,000 of 1,000 bytes")
    assert lines[1].startswith("workers 0 (2 silent)")
    assert line_with(lines, "cpu:3@").strip() == "cpu:3@node  silent for 35 s: Redis is full"
    assert line_with(lines, "cpu:4@").strip() == "cpu:4@node  gone 35 s ago: killed by SIGKILL"
    assert "start one" not in "".join(lines)
    assert "none is seen: a full Redis takes no heartbeats" in shown(replace(overview(), full_bytes=(2_000, 1_000)))


def test_everything_that_matters_is_readable_in_80_columns() -> None:
    lines = shown(everything_once())
    assert lines[0] == "workers 3 (1 hung, 1 gone)  records/s 1,204  tokens/s 18.2k  chunks 32  jobs 1"
    assert line_with(lines, "cpu mini") == "cpu mini · 3 live: 1 busy, 1 hung, 1 idle · packed"
    assert " ".join(line_with(lines, "cpu:0@").split()) == "cpu:0@node busy 1,204 18,204 12% 3 s ago d974cc1efb 12,13"
    assert " ".join(line_with(lines, "cpu:1@").split()) == "cpu:1@node idle – – – –"
    assert "hung" in line_with(lines, "cpu:2@")
    assert "34 s ago" in line_with(lines, "cpu:2@")
    assert line_with(lines, "cpu:3@").strip() == "cpu:3@node  gone 35 s ago: no word from it"
    assert line_with(lines, "24").split() == ["cpu", "mini", "24", "12", "s", "3"]
    assert line_with(lines, JOB).split()[:2] == [JOB, "running"]
    assert line_with(lines, JOB).split()[3:] == ["3,000/6,000", "0", "1,000", "3", "s"]
    ended = line_with(lines, "20261121-070000-0000000001").split()
    assert ended[1:5] == ["completed", "12s", "ago", "6,000/6,000"]


def test_a_queue_without_workers_comes_first_with_the_command_that_starts_one() -> None:
    lines = shown(everything_once())
    at = next(at for at, line in enumerate(lines) if line.startswith("QUEUES"))
    assert lines[at + 1].split() == ["gpu", "mini", "8", "–", "0"]
    assert lines[at + 2] == "  start one: embedctl worker --class gpu --model mini"
    nothing = shown(overview())
    assert "none is alive; `embedctl worker` starts one, which is shown a few seconds later" in nothing
    assert "none; `embedctl submit` makes one" in nothing


def test_hundreds_of_workers_leave_room_for_the_rest_and_hide_none_that_hangs() -> None:
    lines = shown(a_lot(), 80, 22)
    assert "1 hung" in lines[0]
    assert "cpu:300@node" in "".join(lines)
    assert " not shown) · packed" in line_with(lines, "cpu mini")
    assert any(line.startswith("… and ") and line.endswith(" more queues") for line in lines)
    jobs = [line for line in lines if line.startswith("20261121-")]
    assert jobs
    assert line_with(lines, "more active jobs") == f"… and {1_234 - len(jobs):,} more active jobs"


@pytest.mark.parametrize(
    ("facts", "state", "note"),
    [
        ({"state": "submitting", "sealed": 0}, "stalled", ""),
        ({"lost_first": 3, "lost_last": 9}, "running", "lost: Redis lost chunks 3 to 9; the same corpus"),
        ({"deaths": 2}, "running", "suspect: 2 workers died over its texts; `embedctl status JOB` says"),
        ({"mismatch": "b", "model_fingerprint": "a"}, "running", "mismatch: No live worker has the files of job"),
    ],
)
def test_what_keeps_a_job_from_its_end_stands_below_it(facts: dict[str, Any], state: str, note: str) -> None:
    seen = replace(job(producer_alive=False, **facts), mismatch=facts.get("mismatch"))
    lines = shown(overview(active=[pace(seen, None)]))
    at = next(at for at, line in enumerate(lines) if line.startswith(JOB))
    assert lines[at].split()[1] == state
    below = lines[at + 1].strip() if at + 1 < len(lines) else ""
    assert below.startswith(note)
    assert bool(below) is bool(note)


def test_a_rate_is_taken_over_the_last_seconds() -> None:
    rate = Rate()
    assert rate.add(0, 0, 0) is None
    assert rate.add(0.5, 10, 100) is None  # too short to tell
    assert rate.add(2, 10, 100) == (5.0, 50.0)
    assert rate.add(10, 40, 400) == (4.0, 40.0)
    assert rate.add(2 + rates.OVER_S, 40, 400) == (2.0, 20.0)  # since the third sample
    assert rate.add(100, 40, 400) is None
    assert rate.add(102, 40, 400) is None
    assert rate.add(104, 20, 400) == (0.0, 0.0)  # Redis lost results


def test_a_feed_keeps_what_it_saw_while_redis_is_away() -> None:
    answers: list[int | Exception] = [1, BrokerUnavailable("it is away")]

    def look() -> int:
        answer = answers[0] if len(answers) == 1 else answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    feed = Feed(look, interval_s=0.01)
    first = feed.sight()
    assert (first.what, first.trouble) == (1, "")
    with feed:
        eventually(lambda: feed.sight().trouble)
        assert (feed.sight().what, feed.sight().at, feed.sight().trouble) == (1, first.at, "it is away")
        answers[:] = [2]
        eventually(lambda: feed.sight().what == 2)
        assert feed.sight().trouble == ""
        assert feed.sight().moment > first.moment


def test_a_feed_tells_what_can_not_get_better() -> None:
    def refuse() -> int:
        raise BrokerUnavailable("it was never there")

    with pytest.raises(BrokerUnavailable, match="never there"):
        Feed(refuse)

    asked = iter([1])

    def look() -> int:
        for answer in asked:
            return answer
        raise JobNotFound("it was discarded")

    with Feed(look, interval_s=0.01) as feed, pytest.raises(JobNotFound, match="discarded"):
        eventually(lambda: feed.sight() is None)
