"""The probe of turns: what it costs Redis to find whose turn it is, and to end a chunk."""

from __future__ import annotations

import os
import statistics
from collections import defaultdict

from benchmarks.ours.service import Figures, service, slow_log
from tests.support.shares import LARGE, job_of
from tests.support.store import MINE, QUEUE, encoded, row, take

from embedctl.queueing.broker import Broker
from embedctl_config import keys, wire

#: Lists copies of a job. KEYS: what jobs' keys begin with, active, jobs, upkeep, what the keys of turns begin with.
#: ARGV: job, queue, kind, tenants, chunks, first and last copy, how many copies have text, and of how many chunks.
_COPIES = """
local like, place = KEYS[1] .. ARGV[1], ARGV[2] .. ':' .. ARGV[3]
for number = tonumber(ARGV[6]), tonumber(ARGV[7]) do
  local id = ARGV[1]:sub(1, 16) .. string.format('%010x', number)
  local tenant, job = 'tenant-' .. number % ARGV[4], KEYS[1] .. id
  redis.call('COPY', like, job)
  redis.call('HSET', job, 'tenant', tenant)
  for chunk = 0, number < tonumber(ARGV[8]) and ARGV[9] - 1 or -1 do
    redis.call('COPY', like .. ':in:' .. chunk, job .. ':in:' .. chunk)
  end
  for shared = 2, 4 do redis.call('ZADD', KEYS[shared], redis.call('TIME')[1] * 1000, id) end
  redis.call('ZADD', KEYS[5] .. 'left:normal:' .. tenant .. ':' .. place, ARGV[5], id)
  redis.call('ZADD', KEYS[5] .. 'wait:normal:' .. tenant .. ':' .. place, number, id)
  redis.call('ZADD', KEYS[5] .. 'flows:normal:' .. place, 0, tenant)
end
redis.call('SADD', KEYS[5] .. 'kinds:' .. ARGV[2], 'normal:' .. ARGV[3])
"""
#: So many at a time: Redis refuses everybody while a script takes longer than 5 s.
_LOADED = 500
#: Only what takes longer is kept (µs). If that of each command in a script was, the script would take longer by a
#: seventh.
_LONGER_US = 20
#: After so many steps, the worker is heard of again.
_HEARD = 1000


def cost_of_turns(*, tenants: int = 1000, jobs: int = 100_000, turns: int = 4000, fifo: bool = False) -> Figures:
    """What a chunk costs Redis (median of µs, by its slow log) while many jobs of many tenants wait.

    `next` finds whose turn it is, and `complete` ends the chunk: once for full chunks (10 kB) of jobs that go on, with
    the first ones of these jobs apart, and once for jobs of one chunk of 1 kB, which end. In each round, every tenant
    has a turn. With `fifo`, which root may use, other work on the machine does not interrupt Redis.
    """
    rounds = max(2, turns // tenants)
    found: Figures = {}
    for kind, chunks, size, having in (("full chunks", rounds + 100, LARGE, 1), ("jobs of one chunk", 1, 1000, rounds)):
        with service() as of:
            broker = Broker.connect(of.settings)
            if fifo:
                with broker.connection.client() as client:
                    os.sched_setscheduler(client.info("server")["process_id"], os.SCHED_FIFO, os.sched_param(1))
            texts = min(rounds + 1, chunks)
            load_jobs(broker, tenants, jobs, chunks, size, with_text=(having + 1) * tenants, texts=texts)
            found |= {f"{kind}: {what}": value for what, value in cost(broker, tenants, rounds).items()}
    return found


def load_jobs(broker: Broker, tenants: int, jobs: int, chunks: int, size: int, *, with_text: int, texts: int) -> None:
    """List copies of a job, in turn for each tenant. Of the first ones, which are to have turns, the first chunks have
    text."""
    like = job_of(broker, chunks=chunks, size=size)
    script_keys = [keys.job(""), keys.ACTIVE, keys.JOBS, keys.UPKEEP, keys.turns("")]
    with broker.connection.client() as client:
        load = client.register_script(_COPIES)
        for first in range(0, jobs, _LOADED):
            copies = [first, min(jobs, first + _LOADED) - 1, with_text, texts]
            load(script_keys, [like, QUEUE, f"fp32/{wire.VERSION}:*", tenants, chunks, *copies])
    broker.jobs.cancel(like)


def cost(broker: Broker, tenants: int, rounds: int) -> Figures:
    """Take a chunk of each tenant and complete these, so often: what that costs, and in the first round."""
    took: dict[str, list[float]] = defaultdict(list)

    def heard(step: int) -> None:
        if step % _HEARD == 0:
            broker.workers.beat(row())

    for number in range(rounds):
        first = "" if number else ", first chunks"
        claims = []
        with slow_log(broker, _LONGER_US) as told:
            for step in range(tenants):
                heard(step)
                claims.append(take(broker, f"token-{number}-{step}"))
        with slow_log(broker, _LONGER_US) as told_too:
            for step, claim in enumerate(claims):
                heard(step)
                assert claim is not None
                value, report = encoded(claim.input)
                answer = broker.jobs.complete(claim.job_id, claim.chunk, claim.token, value, report, fingerprint=MINE)
                assert answer == "ok", answer
        took[f"next{first}"] += told["next"]
        took[f"complete{first}"] += told_too["complete"]
    found = {name: statistics.median(each) for name, each in took.items()}
    return found | {"both": found["next"] + found["complete"]}
