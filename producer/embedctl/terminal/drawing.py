"""Overviews and jobs as lines for a terminal, cut to its width and height."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from itertools import chain

from rich.text import Text

from embedctl.queueing.routing import how_to_serve, redis_full
from embedctl.store import GoneWorker, JobState, JobStatus, Kind, Starting
from embedctl.store.workers import SILENT
from embedctl.terminal.columns import Column, Row, arrange, cut, plain, share
from embedctl.terminal.job_facts import troubles
from embedctl.waiting.overview import JobPace, Overview, QueueState, WorkerState
from embedctl_config import keys

#: From this width on, numbers are written in full and bars are longer.
_WIDE = 110
_BAR, _WIDE_BAR = 6, 16
_UNKNOWN = "–"
_BAD, _WARN, _GOOD, _DIM = "bold red", "yellow", "green", "dim"
_STATE_STYLES = {
    JobState.RUNNING: _GOOD,
    JobState.COMPLETED: _GOOD,
    JobState.COMPLETED_WITH_ERRORS: _WARN,
    JobState.FAILED: _BAD,
    JobState.STOPPED: _WARN,
    JobState.CANCELLED: _DIM,
}
_ACTIVITY_STYLES = {"busy": _GOOD, "idle": _DIM, "hung": _BAD}
_WORKERS = (
    Column("WORKERS", 24, floor=20),
    Column("DEVICE", 10, rank=4),
    Column("STATE", 5, floor=5),
    Column("RECORDS/S", 9, right=True),
    Column("TOKENS/S", 8, rank=1, right=True, floor=8),
    Column("PAD", 4, rank=2, right=True, floor=4),
    Column("LAST BATCH", 10, rank=1, right=True, floor=10),
    Column("IN HAND", 16, rank=3),
)
_QUEUES = (
    Column("QUEUES", 6),
    Column("MODEL", 8, floor=16),
    Column("WAITING", 7, right=True),
    Column("OLDEST", 6, right=True, floor=6),
    Column("WORKERS", 7, rank=1, right=True),
)
_JOBS = (
    Column("JOBS", 26),
    Column("STATE", 10, floor=9),
    Column("PROGRESS", 6, rank=2),
    Column("DONE", 13, right=True, floor=11),
    Column("FAIL", 4, rank=2, right=True),
    Column("RECORDS/S", 9, rank=1, right=True),
    Column("LEFT", 6, rank=1, right=True, floor=6),
    Column("CLASS", 5, rank=4),
    Column("MODEL", 8, rank=3),
)
#: More workers that are gone than this, of one class, model and engine, have one line together; so have those that are
#: not ready.
_FEW = 3
#: A line and the lines that explain it.
Block = Sequence[Row]


def overview_lines(overview: Overview, width: int | None = None, height: int | None = None) -> list[Text]:
    """A full Redis, the sums, the workers, the queues and the jobs, in at most so many cells and lines; None for no
    limit."""
    first = [plain(redis_full(overview.full_bytes), _BAD)] if overview.full_bytes else []
    groups = _groups(overview)
    unserved_first = sorted(overview.queues, key=lambda each: (each.workers > 0, each.hardware, each.model))
    awaited = {keys.queue(each.hardware, model) for each in overview.starting for model in each.models}
    queues = [_queue_block(queue, hindered=_is_hindered(queue, awaited, overview)) for queue in unserved_first]
    ended = [_ended_block(pace, overview.at, width) for pace in overview.ended]
    rooms: list[int | None] = [None] * 3
    if height is not None:
        wants = [
            sum(1 + group.length for group in groups),
            sum(map(len, queues)),
            sum(1 + len(_notes(pace.job)) for pace in overview.active)
            + (overview.active_count > len(overview.active))
            + sum(map(len, ended)),
        ]
        # Seven lines are the sums, and for each part an empty line and its heads.
        rooms = [*share(max(0, height - len(first) - 7), [max(1, want) for want in wants])]
    workers = _worker_rows(groups, overview.at, rooms[0])
    parts = [
        (_WORKERS, workers or [plain(_none_alive(overview), _WARN)]),
        (_QUEUES, _filled(queues, rooms[1], len(queues), "queues") or [plain("none", _DIM)]),
        (
            _JOBS,
            _job_rows((_active_block(pace, width) for pace in overview.active), ended, rooms[2], overview.active_count)
            or [plain("none; `embedctl submit` makes one", _DIM)],
        ),
    ]
    tables = ([Text(), *arrange(columns, rows, width)] for columns, rows in parts)
    return [*(cut(line, width) for line in (*first, _sums(overview, width))), *chain.from_iterable(tables)][:height]


def job_lines(pace: JobPace, facts: Sequence[tuple[str, str]], width: int, height: int) -> list[Text]:
    """A job's facts name by name; its progress stands before the model, after what keeps the job from its end."""
    job = pace.job
    share_done = pace.finished / job.records if job.records else 0.0
    speed = f"{number(pace.records_per_s, width)} records/s  {number(pace.tokens_per_s, width)} tokens/s"
    rest = f"  {share_done:.0%}  {speed}  {duration(pace.seconds_left)} left"
    progress = plain(f"{'progress':<10} ").append_text(bar(share_done, _WIDE_BAR)).append(rest)
    lines = [plain(f"{name:<10} {value}") for name, value in facts]
    at = next((at for at, (name, _) in enumerate(facts) if name == "model"), 2)
    rows = _filled([[line] for line in (*lines[:at], progress, *lines[at:])], height, len(lines) + 1, "lines")
    return [cut(row, width) for row in rows if isinstance(row, Text)]


def bar(share_done: float, width: int) -> Text:
    """A bar of this many cells, which is readable without colours too."""
    full, half = divmod(min(2 * width, int(2 * width * share_done)), 2)
    return Text.assemble(("━" * full + "╸" * half, _GOOD), ("─" * (width - full - half), _DIM), no_wrap=True)


def number(value: float | None, width: int | None = None) -> str:
    """A number in full, or in at most 5 characters if the terminal is narrow."""
    if value is None:
        return _UNKNOWN
    if width is None or width >= _WIDE or value < 9_999.5:
        return f"{value:,.0f}"
    for unit in "kM":
        value /= 1000
        if value < 999.5:
            return f"{value:.1f}{unit}" if value < 99.95 else f"{value:.0f}{unit}"
    return f"{value / 1000:.0f}G"


def duration(seconds: float | None) -> str:
    """A time for people, in at most 6 characters if it is below 3 years."""
    if seconds is None:
        return _UNKNOWN
    for length, unit in ((1, "s"), (60, "min"), (3600, "h")):
        if seconds < 99.5 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def _sums(overview: Overview, width: int | None) -> Text:
    hung = sum(each.row.activity == "hung" for each in overview.workers)
    gone = len(overview.gone)
    counts = ((len(overview.starting), "not ready"), (hung, "hung"), (gone, _absent(overview)))
    notes = [f"{count:,} {word}" for count, word in counts if count]
    facts = [
        ("workers", number(len(overview.workers), width)),
        ("records/s", number(overview.rows_per_s, width)),
        ("tokens/s", number(overview.tokens_per_s, width)),
        ("chunks", number(overview.chunks, width) + "+" * (overview.active_count > len(overview.active))),
        ("jobs", number(overview.active_count, width)),
    ]
    line = plain("")
    for name, value in facts:
        line.append("  " if line else "").append(f"{name} ", _DIM).append(value, "bold")
        if name == "workers" and notes:
            line.append(f" ({', '.join(notes)})", _BAD if hung or gone else _WARN)
    return line


def _none_alive(overview: Overview) -> str:
    if overview.full_bytes:
        return "none is seen: a full Redis takes no heartbeats"
    return "none is alive; `embedctl worker` starts one, which is shown a few seconds later"


def _absent(overview: Overview) -> str:
    """What workers without a heartbeat are: a full Redis takes none."""
    return "silent" if overview.full_bytes else "gone"


def _filled(blocks: Iterable[Block], room: int | None, count: int, noun: str) -> list[Row]:
    """The blocks that fit, and a line with the number of the others; `count` is the number of all."""
    rows: list[Row] = []
    shown = 0
    for block in blocks:
        left_out = count - shown - 1
        if room is not None and len(rows) + len(block) + (left_out > 0) > room:
            break
        rows += block
        shown += 1
    if shown < count and room != 0:
        rows.append(plain(f"… and {count - shown:,} more {noun}", _DIM))
    return rows


# Workers


@dataclass(slots=True)
class _Group:
    """Workers that serve the same models in the same way. Of the live ones, the hung come first, because there may not
    be room for all. If `full`, Redis takes no
    heartbeat. `files` are the beginnings of their fingerprints; they are shown if `others_files` serve the same, such
    as those of another pooling."""

    hardware: str
    models: str
    engine: str
    files: str = ""
    live: list[WorkerState] = field(default_factory=list)
    gone: list[GoneWorker] = field(default_factory=list)
    starting: list[Starting] = field(default_factory=list)
    full: bool = False
    others_files: bool = False

    @property
    def _folds(self) -> bool:
        return len(self.gone) > _FEW

    @property
    def length(self) -> int:
        return len(self.live) + min(len(self.starting), _FEW + 1) + (1 if self._folds else len(self.gone))

    def rows(self, now: datetime, most: int) -> list[Row]:
        """The first rows: hung workers, those that are gone, and then the others. A row takes a while to make."""
        hung = sum(state.row.activity == "hung" for state in self.live)
        gone = [_folded_row(len(self.gone))] if self._folds else [_gone_row(each, self.full) for each in self.gone]
        gone += _starting_rows(self.starting, now)
        first = [_worker_row(state, now) for state in self.live[: min(hung, most)]]
        rest = self.live[hung : hung + max(0, most - len(first) - len(gone))]
        return [*first, *gone, *(_worker_row(state, now) for state in rest)][:most]

    def heading(self, left_out: int = 0) -> Text:
        """What the workers have in common, and how many they are; some may have no row."""
        activities = Counter(each.row.activity for each in self.live)
        alive = f"{len(self.live)} live"
        if len(self.live) > 1:
            alive += f": {', '.join(f'{count} {activity}' for activity, count in sorted(activities.items()))}"
        if left_out:
            alive += f" ({left_out:,} not shown)"
        facts = [plain(f"{self.hardware} {self.models}", "cyan"), plain(alive, _DIM), plain(self.engine, _DIM)]
        facts += [plain(f"fingerprint {self.files}", _WARN)] * self.others_files
        return Text.assemble((" · ", _DIM), no_wrap=True).join(filter(None, facts))


def _groups(overview: Overview) -> list[_Group]:
    groups: dict[Kind, _Group] = {}

    def group_of(kind: Kind) -> _Group:
        return groups.setdefault(kind, _Group(*kind))

    for state in overview.workers:
        group_of(state.row.kind).live.append(state)
    for each in overview.gone:
        group_of(each.worker.kind).gone.append(each)
    for worker in overview.starting:
        alike = worker.hardware, ", ".join(worker.models)
        group_of(next((kind for kind in groups if kind[:2] == alike), (*alike, "", ""))).starting.append(worker)
    alike_but_for_files = Counter(kind[:3] for kind in groups)
    for kind, group in groups.items():
        group.full = overview.full_bytes is not None
        group.others_files = alike_but_for_files[kind[:3]] > 1
        group.live.sort(key=lambda each: (each.row.activity != "hung", each.row.host, _natural(each.row.name)))
    return [groups[kind] for kind in sorted(groups)]


@lru_cache(4096)
def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts `cpu:4-7` before `cpu:10-13`."""
    return [(int(digits or 0), letters) for digits, letters in re.findall(r"(\d*)(\D*)", name.partition("@")[0])]


def _worker_row(state: WorkerState, now: datetime) -> Row:
    row, encodes = state.row, state.encodes
    hung = row.activity == "hung"
    if hung:
        batch = f"{duration(row.quiet_s)} ago"
    elif row.progressed_ms:
        batch = f"{duration(max(0.0, now.timestamp() - row.progressed_ms / 1000))} ago"
    else:
        batch = _UNKNOWN
    chunks: dict[str, list[str]] = {}
    for job_id, chunk in row.holding:
        chunks.setdefault(job_id.rpartition("-")[2], []).append(str(chunk))
    cells = (
        ("  " + row.name, _BAD if hung else ""),
        (row.device or f"cpu {row.cpus}", ""),
        (row.activity, _ACTIVITY_STYLES[row.activity]),
        (number(encodes.rows_per_s or None if encodes else None), ""),
        (number(encodes.tokens_per_s or None if encodes else None), ""),
        (f"{encodes.padding:.0%}" if encodes and encodes.tokens_per_s else _UNKNOWN, ""),
        (batch, _BAD if hung else ""),
        (" ".join(f"{job} {','.join(each)}" for job, each in chunks.items()), _DIM),
    )
    return [plain(value, style) for value, style in cells]


def _gone_row(gone: GoneWorker, full: bool) -> Row:
    if full and gone.how == SILENT:
        return plain(f"  {gone.worker.name}  silent for {duration(gone.seconds)}: Redis is full", _WARN)
    return plain(f"  {gone.worker.name}  gone {duration(gone.seconds)} ago: {gone.how}", _WARN)


def _starting_rows(starting: Sequence[Starting], now: datetime) -> list[Row]:
    rows: list[Row] = []
    for worker in starting[:_FEW]:
        since = duration(max(0.0, now.timestamp() - worker.began_ms / 1000))
        doing = worker.words(now.timestamp() * 1000)
        rows.append(plain(f"  {worker.name}  {doing}; not ready for {since}", _WARN))
    if len(starting) > _FEW:
        rows.append(plain(f"  … and {len(starting) - _FEW:,} more that are not ready", _WARN))
    return rows


def _folded_row(count: int) -> Row:
    minutes = keys.GONE_TTL_S // 60
    return plain(f"  {count} gone in the last {minutes} minutes; `embedctl doctor` names them", _WARN)


def _worker_rows(groups: Sequence[_Group], now: datetime, room: int | None) -> list[Row]:
    if room is None:
        return [row for group in groups for row in (group.heading(), *group.rows(now, group.length))]
    if room <= len(groups):  # the headings give the sums
        return _filled([[group.heading()] for group in groups], room, len(groups), "kinds of workers")
    rooms = share(room - len(groups), [group.length for group in groups])
    return [
        row
        for group, own in zip(groups, rooms, strict=True)
        for row in (group.heading(left_out=group.length - own), *group.rows(now, own))
    ]


# Queues


def _is_hindered(queue: QueueState, awaited: Collection[str], overview: Overview) -> bool:
    """Whether something else than a missing worker is known to be the reason why no live one serves a queue."""
    return overview.full_bytes is not None or keys.queue(queue.hardware, queue.model) in awaited


def _queue_block(queue: QueueState, *, hindered: bool) -> Block:
    style = "" if queue.workers else _WARN
    cells = (queue.hardware, queue.model, f"{queue.chunks:,}", duration(queue.oldest_s), f"{queue.workers:,}")
    row = [plain(value, style) for value in cells]
    if queue.workers or hindered:
        return [row]
    return [row, plain(f"  {how_to_serve(queue.hardware, queue.model, queue.near_models)}", _WARN)]


# Jobs


def _active_block(pace: JobPace, width: int | None) -> Block:
    job = pace.job
    length = _BAR if width is not None and width < _WIDE else _WIDE_BAR
    progress = bar(pace.finished / job.records if job.records else 0.0, length)
    state = plain("stalled", _BAD) if job.stalled else plain(job.state, _STATE_STYLES.get(job.state, ""))
    row = _job_row(pace, state, progress, width)
    return [row, *(plain(f"  {note}", _WARN) for note in _notes(job))]


def _notes(job: JobStatus) -> list[str]:
    notes = [f"{name}: {said}" for name, said in troubles(job)]
    if job.deaths:
        workers = "a worker" if job.deaths == 1 else f"{job.deaths} workers"
        notes.append(f"suspect: {workers} died over its texts; `embedctl status JOB` says of which")
    return notes


def _ended_block(pace: JobPace, now: datetime, width: int | None) -> Block:
    job = pace.job
    state = plain(job.state.partition("_")[0], _STATE_STYLES[job.state])
    since = None if job.ended_at is None else max(0.0, (now - job.ended_at).total_seconds())
    ago = duration(since) if width is None or width >= _WIDE else duration(since).replace(" ", "")
    return [_job_row(pace, state, plain(f"{ago} ago", _DIM), width)]


def _job_row(pace: JobPace, state: Text, progress: Text, width: int | None) -> Row:
    job = pace.job
    open_end = "" if job.sealed or job.state.ended else "+"
    return [
        plain(job.id),
        state,
        progress,
        plain(f"{number(pace.finished, width)}/{number(job.records, width)}{open_end}"),
        plain(number(job.failed, width), _BAD if job.failed else ""),
        plain(number(pace.records_per_s, width)),
        plain(duration(pace.seconds_left)),
        plain(job.hardware),
        plain(job.model),
    ]


def _job_rows(active: Iterable[Block], ended: Sequence[Block], room: int | None, active_count: int) -> list[Row]:
    rows = _filled(active, room, active_count, "active jobs")
    for block in ended:
        if room is None or len(rows) + len(block) <= room:
            rows += block
    return rows
