-- Shared by the scripts of files and batches. All dates are Redis' own, and no gateway's.
local time = redis.call('TIME')
local now_s, now = tonumber(time[1]), time[1] * 1000 + math.floor(time[2] / 1000)

local ENDED = {completed = true, failed = true, expired = true, cancelled = true}
local KEPT = LEDGER .. 'kept'

-- Count bytes of files that a tenant keeps, by the key of its set.
local function keep_bytes(set, size)
  if size == 0 then return end
  redis.call('HINCRBY', KEPT, set, size)
  redis.call('PEXPIRE', KEPT, KEPT_MS)
end

-- Let the parts of a file whose facts are there outlive these by a minute. Until then they live as those of no file, so that
-- a kill before this leaves nothing for long.
local function keep_parts(file, ttl_ms)
  local facts = redis.call('HMGET', file, 'data', 'parts')
  for part = 0, facts[2] - 1 do
    redis.call('PEXPIRE', JOB .. facts[1] .. ':out:' .. part, ttl_ms + 60000)
  end
end

-- The time that deadlines count by: that of Redis, of which a step counts as a few seconds at most. So no clock that is set
-- ends a batch, and neither does a time in which no gateway looked.
local function ledger_now()
  local seen = redis.call('HMGET', CLOCK, 'redis', 'ledger')
  local ledger = tonumber(seen[2] or now) + math.max(0, math.min(now - (seen[1] or now), STEP_MS))
  redis.call('HSET', CLOCK, 'redis', now, 'ledger', ledger)
  redis.call('PEXPIRE', CLOCK, KEPT_MS)
  return ledger
end

-- List a batch that has not ended: by when somebody is to look at it, and by the deadline that its record has.
local function look_at(id, tenant, at_ms)
  redis.call('ZADD', UNFINISHED .. tenant, at_ms, id)
  redis.call('PEXPIRE', UNFINISHED .. tenant, KEPT_MS)
  redis.call('ZADD', TURNS, 'NX', 0, tenant)
  redis.call('PEXPIRE', TURNS, KEPT_MS)
end

local function note_deadline(id)
  redis.call('ZADD', DEADLINES, redis.call('HGET', BATCH .. id, 'deadline_ms') or 0, id)
  redis.call('PEXPIRE', DEADLINES, KEPT_MS)
end

-- Let a batch have this status from now on, and the deadline that this has.
local function enter(id, status)
  local batch = BATCH .. id
  redis.call('HSET', batch, 'status', status, status .. '_at', now_s)
  if status == 'validating' or status == 'in_progress' then
    redis.call('HSET', batch, 'deadline_ms', redis.call('HGET', batch, 'window_ms') or ledger_now())
  elseif status == 'finalizing' or status == 'cancelling' then
    redis.call('HSET', batch, 'deadline_ms', ledger_now() + END_MS)
  else
    redis.call('ZREM', DEADLINES, id)
    return
  end
  note_deadline(id)
end

-- End a batch. With `told`, a webhook is to tell it.
local function finish(id, status, told)
  enter(id, status)
  redis.call('HDEL', BATCH .. id, 'runner')
  redis.call('PEXPIRE', BATCH .. id, KEPT_MS)
  redis.call('ZREM', UNFINISHED .. (redis.call('HGET', BATCH .. id, 'tenant') or ''), id)
  if not told then return end
  -- Another end, of a batch whose first one Redis has lost, is another event: a receiver leaves out those that it knows.
  local event_id = id:gsub('^batch_', 'evt_') .. '_' .. status
  redis.call('HSET', EVENT .. event_id, 'type', 'batch.' .. status, 'batch', id, 'created', now_s)
  redis.call('PEXPIRE', EVENT .. event_id, EVENT_MS)
  redis.call('ZADD', UNTOLD, 0, event_id)
  redis.call('PEXPIRE', UNTOLD, EVENT_MS)
end
