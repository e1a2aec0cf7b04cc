"""The invariants: what must hold after every step, and what must become true once nothing goes wrong any more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from embedctl_config import keys, wire
from tests.explorer.actors import Actor, Run
from tests.explorer.snapshots import TURNS, Snapshot, View, fields
from tests.explorer.world import State, World
from tests.support.store import QUEUE


@dataclass(frozen=True, slots=True)
class Violation:
    """A violated invariant: its name, and what was seen."""

    invariant: str
    seen: str


def after_step(world: World, before: State, after: State, *, reopens: bool, goes_back: bool) -> Iterator[Violation]:
    """The violations after a step, which may have reopened an ended job, or have lost something of Redis."""
    yield from _lifetimes(world)
    if not goes_back:
        yield from _turns(world, before.snapshot, after.snapshot)
        yield from _places_apart(world, before.snapshot, after.snapshot)
        yield from _suspects(world, before.snapshot, after.snapshot)
        yield from _watched(world, before.snapshot, after.snapshot)
    view, *others = world.views(after.snapshot)
    for each in others:
        yield from _states(each, False)
        yield from _counts(each)
        yield from _bookkeeping(each)
    yield from _limits(view)
    if not view.job:
        return
    missing = any(view.is_missing(chunk) for chunk in after.lost)
    yield from _states(view, missing)
    if view.state == "cancelled":
        yield from _bookkeeping_is_gone(view)
        was = world.view(before.snapshot)
    else:
        if not missing:  # a lost result breaks the counts until the corpus repairs it
            yield from _counts(view)
        if not after.went_back and view.text("results_high_water") is not None:
            yield from _bytes_of_results(view)
        yield from _bookkeeping(view)
        yield from _digests(view, after)
        was = world.view(before.snapshot)
    if not reopens and was.ended and was.state != "gone":
        if was.state != view.state:
            yield Violation("an ended job stays ended", f"it was {was.state} and is {view.state}")
        elif was.text("ended_ms") != view.text("ended_ms"):
            yield Violation("an ended job stays ended", "its time of ending changed")


def _lifetimes(world: World) -> Iterator[Violation]:
    if world.connection.bare:
        yield Violation("every key has a TTL", f"{world.connection.bare} have none")


def _turns(world: World, before: Snapshot, after: Snapshot) -> Iterator[Violation]:
    """What a tenant had never becomes less, but for an estimate that was too high."""
    estimated = sum(
        int(owner.split(b" ")[2])
        for was, now in zip(world.views(before), world.views(after), strict=True)
        for chunk, owner in was.fields(keys.owners(was.job_id)).items()
        if chunk not in now.fields(keys.owners(now.job_id))
    ) + sum(max(0, -was.number("owed")) for was in world.views(before))
    had, has = _had(before), _had(after)
    levels = fields(after.get(TURNS + b"levels:" + QUEUE.encode()))
    for (lane, tenant), work in had.items():
        now = has.get((lane, tenant), float(levels.get(lane, 0)))
        if now < work - estimated:
            yield Violation("a tenant's virtual time never goes back", f"of {tenant.decode()}: {work}, then {now}")


def _places_apart(world: World, before: Snapshot, after: Snapshot) -> Iterator[Violation]:
    """Who waits in quarantine goes back only when something is taken there, whatever is done elsewhere."""
    views = list(zip(world.views(before), world.views(after), strict=True))
    if any(
        now.fields(keys.owners(now.job_id)).keys() & was.fields(keys.suspects(was.job_id)).keys() for was, now in views
    ):
        return
    for key in (key for key in before.keys() & after.keys() if key.startswith(TURNS + b"flows:") and b":apart:" in key):
        since, now = fields(before[key]), fields(after[key])
        if moved := [each for each in since.keys() & now.keys() if since[each] != now[each]]:
            yield Violation("who waits in quarantine keeps its place", f"{moved} in {key.decode()}")


def _suspects(world: World, before: Snapshot, after: Snapshot) -> Iterator[Violation]:
    """What may kill a worker is given to nobody else while there is one in quarantine."""
    if not before.is_guarded:
        return
    quarantine = fields(before.get(keys.queue_quarantine(QUEUE).encode()))
    for was, now in zip(world.views(before), world.views(after), strict=True):
        suspects, owners = was.fields(keys.suspects(was.job_id)), now.fields(keys.owners(now.job_id))
        for chunk in suspects.keys() & owners.keys():
            if (owner := owners[chunk].split(b" ")[1]) not in quarantine:
                yield Violation("suspects are for quarantine", f"{owner.decode()} has chunk {chunk.decode()}")


def _watched(world: World, before: Snapshot, after: Snapshot) -> Iterator[Violation]:
    """A worker is given a watched job's chunk only if it has none of the one that it had before."""
    if not before.is_guarded:
        return
    quarantine = fields(before.get(keys.queue_quarantine(QUEUE).encode()))
    was = {view.job_id: view for view in world.views(before)}
    for now in world.views(after):
        owners, owned = was[now.job_id].fields(keys.owners(now.job_id)), now.fields(keys.owners(now.job_id))
        for chunk, (_, instance, *_) in ((chunk, owner.split(b" ")) for chunk, owner in owned.items()):
            had = before.get(keys.watched(instance.decode()).encode(), b"s ")[1:].split(b" ")[0].decode()
            is_new = chunk not in owners and was[now.job_id].number("watched_ms") > 1
            if is_new and instance not in quarantine and had and had != now.job_id:
                others = was[had].fields(keys.owners(had)).values()
                if any(owner.split(b" ")[1] == instance for owner in others):
                    yield Violation("watched jobs are not in one worker together", f"{instance.decode()} has two")


def _had(snapshot: Snapshot) -> dict[tuple[bytes, bytes], float]:
    """Lane and tenant → the work that it had."""
    had: dict[tuple[bytes, bytes], float] = {}
    for key, packed in snapshot.items():
        if key.startswith((TURNS + b"flows:", TURNS + b"served:")) and b":apart:" not in key:
            lane = key.split(b":")[3]
            for tenant, work in fields(packed).items():
                had[lane, tenant] = max(had.get((lane, tenant), 0.0), float(work))
    return had


def _limits(view: View) -> Iterator[Violation]:
    """What is noted of the job in its tenant's quota is what waits of it, and the sums are those of this one job. A job
    that lacks text, and of which nothing waits, need not be noted: it is when it adds."""
    noted = fields(view.snapshot.get(keys.quota("default").encode()))
    if not noted:
        return
    waiting = None
    if view.job and not view.ended and view.state != "cancelled":
        left = (view.number("records"), *(-view.number(name) for name in ("done", "failed", "resumed_records")))
        waiting = (1, max(0, sum(left)), max(0, view.number("waiting_bytes")))
    own = noted.get(f"job:{view.job_id}".encode())
    told = None if own is None else (1, *map(int, own.split()))
    if told is None and waiting == (1, 0, 0) and view.state == "submitting":
        waiting = None
    sums = tuple(int(noted.get(name, 0)) for name in (b"jobs", b"records", b"bytes"))
    if (told, sums) != (waiting, waiting or (0, 0, 0)):
        yield Violation("what waits is noted", f"{told}, {sums}; {waiting} waits, and the job is {view.state}")


def _states(view: View, missing: bool) -> Iterator[Violation]:
    ended_ms, stopped = view.text("ended_ms"), view.text("stopped_by")
    if view.ended != (ended_ms is not None):
        yield Violation("state and ended_ms agree", f"{view.state}, ended_ms {ended_ms}")
    if stopped and view.state not in ("failed", "cancelled"):
        yield Violation("a stopped job has failed", f"stopped_by {stopped}, and it is {view.state}")
    finished = view.text("sealed") == "1" and view.number("done") + view.number("failed") == view.number("records")
    if view.state != "cancelled" and not stopped:
        if view.ended != finished:
            yield Violation(
                "ended means sealed and all counted",
                f"{view.state}, sealed {view.text('sealed')}, {view.number('done')}+{view.number('failed')} of "
                f"{view.number('records')}",
            )
        if not view.ended and not view.is_active:  # nor would a sweep find it
            yield Violation("what has not ended is active", view.state)
    # A stopped job that is resumed lacks the text that its producer has not added again, for ever if the producer died.
    if view.text("lost_first") is not None and not missing and view.number("resumed_below") == 0:
        yield Violation("nothing is called lost that is not", f"lost from chunk {view.text('lost_first')}")


def _counts(view: View) -> Iterator[Violation]:
    chunks, done, failed, records, waiting, stored = view.number("added"), 0, 0, 0, 0, 0
    # A stopped job that is resumed: the text of these is gone, or as good as gone.
    not_added_again = range(view.number("resumed_to"), view.number("resumed_below"))
    for chunk in range(chunks):
        result, data = view.result(chunk), view.input(chunk)
        if view.is_void(chunk):
            stored += 1
        elif result is not None:
            stored += 1
            errors = len(result.errors)
            moved = errors if view.pointer(chunk) is not None else 0
            done += result.rows - errors
            failed += errors - moved
            records += result.rows - moved
        elif chunk in not_added_again:
            continue
        elif data is not None:
            waiting += len(data)
            records += len(wire.decode_input(data).kinds)
        elif view.text("stopped_by") is None:
            yield Violation("no chunk is without text and result", f"chunk {chunk}")
    seen = {"done": done, "failed": failed, "chunks_done": stored}
    if not_added_again:
        seen |= {"waiting_bytes": waiting}
    elif view.text("stopped_by") is None:
        seen |= {"waiting_bytes": waiting, "records": records}
    for name, count in seen.items():
        if view.number(name) != count:
            yield Violation(
                "counts are those of what is stored", f"{name} is {view.number(name)}, and {count} are there"
            )


def _bytes_of_results(view: View) -> Iterator[Violation]:
    """Whatever dies between any two steps, the job is held back by what Redis holds, and no more and no less."""
    if view.number("result_bytes") != view.undrained_bytes():
        yield Violation(
            "the bytes of results are those of what is stored and not drained",
            f"{view.number('result_bytes')}, and {view.undrained_bytes()} are there",
        )


def _bookkeeping(view: View) -> Iterator[Violation]:
    leased, ready, suspects, tried = (
        {int(each.split(b":")[0]) for each in view.fields(key(view.job_id))}
        for key in (keys.owners, keys.ready, keys.suspects, keys.attempts)
    )
    if view.ended:
        yield from _bookkeeping_is_gone(view)
    if both := leased & (ready | suspects) | ready & suspects:
        yield Violation("a chunk is leased, ready or suspect", f"chunks {sorted(both)} are two of these")
    ready |= suspects
    if done := [chunk for chunk in leased | ready if view.result(chunk) is not None]:
        yield Violation("nobody is to encode what is done", f"chunks {done}")
    if beyond := tried - leased - ready:
        yield Violation("what is kept of a chunk is kept until it is done", f"attempts of {sorted(beyond)}")
    models = {result.fingerprint for at in range(view.number("added")) if (result := view.result(at)) is not None}
    if len(models) > 1:
        yield Violation("the vectors of a job are those of one model", f"{len(models)} models")


def _bookkeeping_is_gone(view: View) -> Iterator[Violation]:
    for key in (keys.owners, keys.attempts, keys.ready, keys.suspects):
        if view.fields(key(view.job_id)):
            yield Violation("an ended job has no bookkeeping of its chunks", key(view.job_id))


def _digests(view: View, state: State) -> Iterator[Violation]:
    for chunk, digest in state.texts:
        result = view.result(chunk)
        if result is not None and result.digest != digest:
            yield Violation(
                "a result is of the text that the job holds", f"chunk {chunk} has the vectors of another text"
            )


def at_rest(world: World, state: State, actors: tuple[Actor, ...]) -> Iterator[Violation]:
    """The violations once all live actors have done what they can."""
    view, *others = world.views(state.snapshot)
    if all(each.ended for each in (view, *others)):
        lists = tuple(TURNS + kind for kind in (b"flows:", b"left:", b"wait:"))
        for key in (key for key in state.snapshot if key.startswith(lists)):
            yield Violation("who has ended takes no turns", f"{key!r} is left")
    for each in others:
        if not each.ended:
            yield Violation("a job beside others ends", f"{each.state}")
        yield from _memory(each)
        yield from _every_record_once(each)
    for actor, known in zip(actors, state.actors, strict=True):
        if not known.is_over:
            yield Violation("nobody waits for what cannot come", f"{actor.name} waits, and the job is {view.state}")
        if isinstance(known, Run) and known.phase == "over":
            yield from _was_told_right(actor, known, view, state)
    if not view.job:
        return
    resumable = view.number("resumed_below") > 0  # its corpus must be added once more, as everybody is told
    if not view.ended and view.text("original_chunks") is not None and not resumable:
        yield Violation(
            "a job that has all its records ends",
            f"{view.state}, sealed {view.text('sealed')}, {view.number('done')}+{view.number('failed')} of "
            f"{view.number('records')}, and nobody will do anything about it",
        )
    if view.is_active and not view.in_agenda:
        yield Violation("what is active is looked after", f"{view.state}, and in no agenda")
    if any(view.is_missing(chunk) for chunk in state.lost):
        return
    if view.ended:
        yield from _memory(view)
    if view.state in ("completed", "completed_with_errors") or (view.state == "failed" and not view.text("stopped_by")):
        yield from _every_record_once(view)


def _memory(view: View) -> Iterator[Violation]:
    if view.is_active or view.in_agenda:
        yield Violation("an ended job is let go by the reaper", f"{view.state}, active or in the agenda")
    waiting = view.number("waiting_bytes") if not view.text("stopped_by") and view.state != "cancelled" else 0
    if waiting:
        yield Violation("an ended job has no text waiting", f"{waiting} bytes")
    kinds = {"in": keys.chunk_input, "out": keys.chunk_result, "retry": keys.retry_pointer}
    freed = {"cancelled": ["in", "out", "retry"]}.get(
        view.state, ["in"] if view.text("stopped_by") == "max_errors" else []
    )
    for kind in freed:
        held = [each for each in range(view.number("added")) if view.string(kinds[kind](view.job_id, each)) is not None]
        if held:
            yield Violation("memory is freed", f"{view.state}, and {kind} of chunks {held} is there")
    if not freed:
        for chunk in range(view.number("added")):
            result = view.result(chunk)
            # A stopped job keeps the failed records of what is done, for a retry once its corpus has resumed it.
            if view.input(chunk) is not None and (result is None or not result.errors):
                yield Violation("memory is freed", f"{view.state}, and the text of chunk {chunk} is there")


def _every_record_once(view: View) -> Iterator[Violation]:
    failed, seen = 0, []
    for index in range(int(view.text("original_chunks") or 0)):
        result = view.result(index)
        if result is None:
            yield Violation("every record of an ended job has one vector or error", f"chunk {index} has none")
            return
        seen += list(result.positions or range(result.first, result.first + result.rows))
        at, errors = index, {(result.positions or range(result.first, 1 << 30))[error.row] for error in result.errors}
        while (later := view.pointer(at)) is not None:
            retried = view.result(later)
            if retried is None:
                yield Violation("every record of an ended job has one vector or error", f"chunk {later} has none")
                return
            positions = retried.positions or ()
            errors = (errors - set(positions)) | {positions[error.row] for error in retried.errors}
            at = later
        failed += len(errors)
    if seen != list(range(view.number("records"))):
        yield Violation("every record of an ended job has one vector or error", f"{seen} of {view.number('records')}")
    if failed != view.number("failed"):
        yield Violation("failed records can be told", f"{failed} are told, and the job counts {view.number('failed')}")


#: Checks that an actor's error or result was true. A plain `JobError` is left out: the retrier's message explains it.
def _was_told_right(actor: Actor, run: Run, view: View, state: State) -> Iterator[Violation]:
    said = run.told
    wrong = False
    if said == "CorpusChanged" and state.went_back and not _changed(state):
        yield Violation("what Redis lost is not called another corpus", f"{actor.name} was told {said}: {run.value}")
        return
    if said == "JobCancelled":
        wrong = view.state != "cancelled" and not state.went_back
    elif said == "JobFailed":
        wrong = view.text("stopped_by") is None and view.state != "cancelled" and not state.went_back
    elif said in ("JobLost", "JobNotFound"):
        wrong = not state.went_back and not view.number("resumed_below")
    elif said == "CorpusChanged":
        wrong = not _changed(state)
    elif said == "returned" and run.value in ("completed", "completed_with_errors"):
        wrong = not view.ended and not state.went_back and view.text("original_chunks") is None
    if wrong:
        yield Violation("what is told is true", f"{actor.name} was told {said}: {run.value}; the job is {view.state}")


def _changed(state: State) -> bool:
    """Whether any program ever submitted another corpus."""
    return any(isinstance(each, Run) and each.others for each in state.actors)
