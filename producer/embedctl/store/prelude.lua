-- Shared by every script about a job but `create`.
local job = KEYS[1]
local owners, ready, counted = job .. ':owners', job .. ':ready', job .. ':counted'
local attempts = job .. ':attempts'
local suspects = job .. ':suspects'
local events = job .. ':events'
local drained = job .. ':out:drained'
local parts = job .. ':out:parts'
local digests = job .. ':out:digests'

-- What the job's hash says of the fields that this script uses, by their names; false for one that it lacks.
local function read()
  local found = redis.call('HMGET', job, $asked)
  return {$known}  -- in one step: a table that grows is costly
end

local facts = read()  -- as they were when the script began
local state, ttl_ms = facts.state, tonumber(facts.ttl_ms)
local sealed = facts.sealed == '1'
local original = tonumber(facts.original_chunks)
-- Whether the job is drained: its results go to files, and are then no longer in Redis.
local drains = facts.results_high_water and true
-- Whether the bytes of its chunks are outside of Redis. What stands here is then a reference to them.
local outside = facts.data and true
-- Where its tenant's limits are, if there are any.
local quota = facts.limited and QUOTA .. (facts.tenant or TENANT)
-- Where it is noted what a gateway's tenant keeps, if this is a job of one.
local kept = facts.keeps and KEPT_BY .. (facts.tenant or TENANT)
if not state then return {'gone'} end
if tonumber(facts.version) ~= WIRE_VERSION then return {'version', facts.version or ''} end
if state == 'cancelled' then return {'cancelled'} end
local ended = state == 'completed' or state == 'completed_with_errors' or state == 'failed'
-- The TTL counts from the job's end. Until the reaper has seen the end, a job with a short TTL lives as long as others.
local life_ms = math.max(ttl_ms, UNENDED_TTL_MS)
local keep_ms = math.floor(life_ms * CHUNK_TTL_FACTOR)

-- Keys shared by all jobs live as long as any job; the reaper's set lives no longer than the other shared keys.
local function share()
  if redis.call('PTTL', UPKEEP) >= (life_ms + keep_ms) / 2 then return end
  for _, shared in ipairs({ACTIVE, JOBS, BIRTH, UPKEEP}) do
    if redis.call('PTTL', shared) < keep_ms then redis.call('PEXPIRE', shared, keep_ms) end
  end
end

local function event(kind, detail)
  local id = redis.call('XADD', events, 'NOMKSTREAM', 'MAXLEN', '~', EVENTS_KEPT, '*', kind, detail)
  if not id then
    id = redis.call('XADD', events, '*', kind, detail)
    redis.call('PEXPIRE', events, keep_ms)
  end
  return id
end

-- Make the reaper look at the job at this time or earlier.
local looked_at = math.huge
local function look_by(at)
  if at >= looked_at then return end
  looked_at = at
  if redis.call('ZADD', UPKEEP, 'LT', string.format('%d', at), ARGV[1]) == 1 then share() end
end

-- Lease a chunk for this long: to whom, as the words of an owner that come before the lease's end, and perhaps a row.
local function lease(chunk, owner, lease_ms, row)
  local until_ms = now + lease_ms
  redis.call('HSET', owners, chunk, string.format(row and '%s %d %s' or '%s %d', owner, until_ms, row))
  if redis.call('PTTL', owners) < 0 then redis.call('PEXPIRE', owners, string.format('%d', keep_ms)) end
  look_by(until_ms)
end

-- What deaths say of the job's tenant, in this queue.
local function faults()
  return FAULTS .. QUEUE_PREFIX .. facts.hardware .. '.' .. facts.model .. ':' .. (facts.tenant or TENANT)
end

-- Whether the job, or its tenant, is distrusted or watched. What is known of a tenant is no job's damage.
local function is_still(whose, what)
  return (tonumber(redis.pcall('HGET', whose, what) or 0) or 0) > now
end

-- Where the job takes turns, how many of its chunks are left, and whether any is ready now, by its facts as they are.
local function place_of(facts)
  if not (facts.hardware and facts.model and facts.precision and facts.next and facts.added and facts.chunks_done) then
    for _, name in ipairs({'hardware', 'model', 'precision', 'next', 'added', 'chunks_done'}) do
      if not facts[name] then error('has no ' .. name, 0) end
    end
  end
  local queue = QUEUE_PREFIX .. facts.hardware .. '.' .. facts.model
  local is_guarded = has_quarantine(queue)
  local first, below, most = tonumber(facts.next), tonumber(facts.added), tonumber(facts.results_high_water)
  local left = below - facts.chunks_done
  -- A stopped job that is resumed has no text yet for the chunks that its producer has not reached.
  if facts.resumed_to and redis.call('GET', job .. ':producer') == redis.call('HGET', job, 'resumed_by') then
    below = tonumber(facts.resumed_to)
  end
  -- It waits for its drainer. The chunk that the drainer waits for is ready in any case.
  if most then
    local bytes, drained_next = unpack(redis.call('HMGET', job, 'result_bytes', 'drained_next'))
    if tonumber(bytes or 0) > most and first > tonumber(drained_next or 0) then below = first end
  end
  return {  -- in one step, as in `read`
    queue = queue, kind = kind_of(facts.precision, facts.model_fingerprint or '*'),
    tenant = facts.tenant or TENANT, lane = facts.lane or LANE, first = first, below = below, left = left,
    is_guarded = is_guarded,
    -- After a death, all that is left of the job is given to quarantine for a while.
    is_apart = is_guarded and (is_still(job, 'distrusted_ms') or is_still(faults(), 'distrusted_ms')),
    is_ready = not ended and (first < below or redis.call('ZCOUNT', ready, '-inf', now) > 0),
  }
end

-- Whether chunks are suspect, also those that rest for a moment, so that nobody waits for the reaper to list them.
local function has_suspects()
  return not ended and redis.call('ZCOUNT', suspects, '-inf', now + SUSPECT_MS) > 0
end

-- The same place for what may kill a worker.
local function apart(place)
  return {lane = place.lane, tenant = place.tenant, queue = place.queue, kind = APART .. place.kind}
end

-- If chunks of the job are ready, let it take turns, as one that waits since then or since now.
local function list_all(place, since)
  local as_usual, has_suspects = place.is_ready and not place.is_apart, has_suspects()
  if as_usual then list(place, ARGV[1], place.left, since or now) end
  if has_suspects or (place.is_ready and place.is_apart) then
    list(apart(place), ARGV[1], place.left, since or now)
  end
  return as_usual or (has_suspects and not place.is_guarded)
end

-- The same, and ring.
local function offer(most)
  if ended then return end
  local place = place_of(read())
  if list_all(place) then ring(place.queue, most or 1) end
end

-- Take the job off the lists before it ends.
local function take_off()
  local known, place = pcall(place_of, read())
  if known then
    leave(place, ARGV[1])
    leave(apart(place), ARGV[1])
  end
end

-- Let a chunk that was given out, perhaps after so many claims, be taken again after the delay.
local function put_back(chunk, delay_ms, claims)
  redis.call('HDEL', owners, chunk)
  if claims then
    redis.call('HSET', attempts, chunk, claims)
    redis.call('PEXPIRE', attempts, keep_ms)
  end
  local to, delay = ready, tonumber(delay_ms)
  if redis.call('HEXISTS', attempts, chunk .. ':deaths') == 1 then to, delay = suspects, math.max(delay, SUSPECT_MS) end
  redis.call('ZADD', to, now + delay, chunk)
  redis.call('PEXPIRE', to, keep_ms)
  if delay > 0 then look_by(now + delay) end
end

local at_rest = false  -- the job has ended, with no work left for the reaper

-- Shorten the lifetimes of an ended job's chunks to the rest of its TTL.
local function settle(from, to, left_ms)
  for chunk = from, to - 1 do
    for _, kind in ipairs({':in:', ':out:', ':retry:'}) do
      redis.call('PEXPIRE', job .. kind .. chunk, left_ms + math.floor(ttl_ms * (CHUNK_TTL_FACTOR - 1)))
    end
  end
end

-- Whether a file holds a chunk's result.
local function is_drained(chunk)
  return drains and redis.call('GETBIT', drained, chunk) == 1
end

-- Let the job, and the idempotency key that finds it, live for so long.
local function live(for_ms)
  redis.call('PEXPIRE', job, for_ms)
  local idempotency = redis.call('HGET', job, 'idempotency_key')
  if idempotency then redis.call('PEXPIRE', idempotency, for_ms) end
end

-- Renew the lifetimes of the job's keys, if more than a thousandth is over: each renewal is a write. A key that is made
-- is given its own. Without its hash, a job does not exist.
local function renew()
  if not at_rest and redis.call('PTTL', job) > life_ms * 0.999 then return end
  live(life_ms)
  for _, key in ipairs({owners, attempts, ready, suspects, counted, ended and counted or events}) do
    redis.call('PEXPIRE', key, keep_ms)
  end
  if drains then
    for _, name in ipairs({'drained', 'parts', 'digests'}) do redis.call('PEXPIRE', job .. ':out:' .. name, keep_ms) end
  end
  share()
end

-- Note progress, with more fields and their values.
local function progress(...)
  redis.call('HSET', job, 'progressed_ms', now_text, ...)
  if not at_rest then look_by(now + LOOK_AFTER_MS) end
  renew()
end

local function enter(new_state)
  state = new_state
  redis.call('HSET', job, 'state', state)
  return event('state', state)
end

-- End a job before all its records are counted, and keep its results. The reaper then frees the text that will not be
-- encoded.
local function stop(by)
  ended = true
  redis.call('UNLINK', owners, attempts, ready, suspects)  -- first: in a full Redis, a script that begins by freeing may go on
  take_off()
  redis.call('HDEL', job, 'resumed_to', 'resumed_below', 'resumed_by', 'resumed_records')
  redis.call('HSET', job, 'ended_ms', now, 'stopped_by', by, 'waiting_bytes', 0)
  look_by(now)
  enter('failed')
end

-- End the job, with all of its records or because its error budget is spent.
local function conclude(done, failed, is_hopeless)
  if is_hopeless then
    stop('max_errors')
    local idempotency = redis.call('HGET', job, 'idempotency_key')
    if idempotency then redis.call('UNLINK', idempotency) end
    redis.call('PEXPIRE', events, ENDED_EVENTS_MS)
    return
  end
  local added = tonumber(facts.added)
  ended = true
  if tonumber(facts.next) < added then take_off() end  -- it is listed for a chunk that was done already
  redis.call('HSET', job, 'ended_ms', now)
  if life_ms > ttl_ms and added <= SETTLED_AT_ONCE then
    settle(0, added, ttl_ms)
    redis.call('UNLINK', job .. ':cursors')
    life_ms, keep_ms = ttl_ms, math.floor(ttl_ms * CHUNK_TTL_FACTOR)
  end
  at_rest = life_ms == ttl_ms  -- otherwise the reaper shortens its lifetime
  if at_rest then
    redis.call('ZREM', ACTIVE, ARGV[1])
    redis.call('ZREM', UPKEEP, ARGV[1])
  else
    look_by(now)
  end
  enter(failed == 0 and 'completed' or done == 0 and 'failed' or 'completed_with_errors')
  redis.call('PEXPIRE', events, math.min(ENDED_EVENTS_MS, keep_ms))  -- waiting processes see the end within a second
end

-- End the job if its error budget is spent, or if it is sealed and every record is counted.
local function end_if_due()
  local done, failed, records = tonumber(facts.done), tonumber(facts.failed), tonumber(facts.records)
  local most, share = tonumber(facts.max_errors), tonumber(facts.max_errors_share)
  local is_hopeless = (most and failed > most) or (share and sealed and failed > share * records + 1e-6)
  if not ended and (is_hopeless or (sealed and done + failed >= records)) then conclude(done, failed, is_hopeless) end
end

-- Open an ended job again.
local function reopen(new_state)
  redis.call('HDEL', job, 'ended_ms')
  redis.call('UNLINK', job .. ':cursors')
  redis.call('HSET', job .. ':cursors', 'extend_next_ms', 1)  -- renew its chunks' lifetimes now
  redis.call('PEXPIRE', job .. ':cursors', life_ms)
  redis.call('ZADD', ACTIVE, now, ARGV[1])
  if redis.call('PTTL', ACTIVE) < keep_ms then redis.call('PEXPIRE', ACTIVE, keep_ms) end
  look_by(now + LOOK_AFTER_MS)
  if ended then enter(new_state) end
  redis.call('PEXPIRE', events, keep_ms)
  ended = false
end

-- The size of a chunk's bytes, wherever they are, from what Redis holds of them.
local function size_in(value)
  local kind = outside and value:byte(KIND_AT + 1) or 0
  return kind > ELSEWHERE and #value > SIZE_AT + 8 and struct.unpack('<I8', value, SIZE_AT + 1) or #value
end

local function size_of(key)
  if not outside then return redis.call('STRLEN', key) end
  local head = redis.call('GETRANGE', key, 0, SIZE_AT + 8)
  return #head > SIZE_AT + 8 and head:byte(KIND_AT + 1) > ELSEWHERE and size_in(head) or redis.call('STRLEN', key)
end

-- The number of records in an input; 0 if there is no input.
local function rows_of(input)
  local count = redis.call('GETRANGE', input, ROWS_AT, ROWS_AT + 3)
  return count == '' and 0 or struct.unpack('<I4', count)
end

-- Note that more bytes of a gateway's job are stored, or fewer.
local function store(bytes)
  if kept and bytes ~= 0 then redis.call('HINCRBY', job, 'kept_bytes', bytes) end
end

-- Note in its tenant's quota what waits of the job now, and what is kept of it.
local function account(known)
  if not quota and not kept then return end
  local is_over, records, bytes = ended or state == 'cancelled', 0, 0
  if not is_over then
    records, bytes = waiting_of(unpack(redis.call('HMGET', job, 'records', 'done', 'failed', 'waiting_bytes',
      'resumed_records')))
  end
  if kept then
    local stored = redis.call('HGET', job, 'kept_bytes')
    note_kept(kept, ARGV[1], kept_of(facts.keeps, stored, records, bytes, sealed or is_over))
  end
  if not quota then return end
  known = known or quota_of(quota, ARGV[1])
  if is_over then return note(quota, ARGV[1], known) end
  -- A job that was not counted has its place when it adds.
  if known[8] or records > 0 then note(quota, ARGV[1], known, records, bytes) end
end

-- Whether the job was made with this token, if there is one.
local function is_made_with(token)
  return not token or redis.call('HGET', job, 'token') == token
end

-- Remove a chunk from the bookkeeping of chunks that were given out. Nothing more is known of one that its first owner has.
local function forget(chunk, claims)
  if redis.call('HDEL', owners, chunk) == 0 then  -- it is in one of them alone
    redis.call('ZREM', ready, chunk)
    redis.call('ZREM', suspects, chunk)
  elseif claims == '1' then
    return
  end
  redis.call('HDEL', attempts, chunk, chunk .. ':deaths', chunk .. ':doubts', chunk .. ':not')
end

-- Take or renew a lease that one process at a time has, or give it up (a lease of 0 ms). That of a dead process lapses.
-- Its key holds the token, or words that begin with it. Returns whether this process has it, and otherwise its owner.
local function take(lease, token, lease_ms, words, dead)
  local owner = redis.call('GET', lease)
  local has_it = owner and owner:match('^%S+')
  if has_it and has_it ~= token and has_it ~= dead then return false, owner end
  if lease_ms == '0' then
    redis.call('UNLINK', lease)
  else
    redis.call('SET', lease, words or token, 'PX', lease_ms)
  end
  return true
end
