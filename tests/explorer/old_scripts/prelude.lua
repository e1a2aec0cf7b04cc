-- Shared by every script but `create`. Times are milliseconds by Redis' own clock, so no host's clock matters.
local job, active, due, owners, attempts, reissues, events, counted = unpack(KEYS, 1, 8)
local meta = redis.call('HMGET', job, 'state', 'version', 'ttl_ms', 'sealed', 'original_chunks')
local state, ttl_ms, sealed, original = meta[1], tonumber(meta[3]), meta[4] == '1', tonumber(meta[5])
if not state then return {'gone'} end
if tonumber(meta[2]) > WIRE_VERSION then return {'newer'} end
if state == 'cancelled' then return {'cancelled'} end
local ended = state == 'completed' or state == 'completed_with_errors' or state == 'failed'
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local keep_ms = math.floor(ttl_ms * CHUNK_TTL_FACTOR)

local function event(kind, detail)
  redis.call('XADD', events, 'MAXLEN', '~', EVENTS_KEPT, '*', kind, detail)
  redis.call('PEXPIRE', events, keep_ms)
end

-- When an issued chunk next needs a ticket, unless something happens to it before.
local function schedule(chunk, delay_ms)
  redis.call('ZADD', due, now + delay_ms, chunk)
  redis.call('PEXPIRE', due, keep_ms)
end

-- The job's own hash lives one TTL from its last progress; when it is gone, so is the job.
local function progress()
  redis.call('HSET', job, 'progressed_ms', now)
  redis.call('PEXPIRE', job, ttl_ms)
  for _, key in ipairs({due, owners, attempts, reissues, counted}) do redis.call('PEXPIRE', key, keep_ms) end
  for _, shared in ipairs({active, JOBS, BIRTH}) do
    if redis.call('PTTL', shared) < keep_ms then redis.call('PEXPIRE', shared, keep_ms) end
  end
  local idempotency = redis.call('HGET', job, 'idempotency_key')
  if idempotency then redis.call('PEXPIRE', idempotency, ttl_ms) end
end

local function enter(new_state)
  state = new_state
  redis.call('HSET', job, 'state', state)
  event('state', state)
end

-- The error budget is spent: the job ends now, and the reaper frees the text that nobody will encode.
local function end_if_hopeless()
  local facts = redis.call('HMGET', job, 'failed', 'records', 'max_errors', 'max_errors_share')
  local failed, records, most, share = tonumber(facts[1]), tonumber(facts[2]), tonumber(facts[3]), tonumber(facts[4])
  if ended or not ((most and failed > most) or (share and sealed and failed > share * records)) then return end
  ended = true
  redis.call('HSET', job, 'ended_ms', now, 'stopped_by', 'max_errors')
  redis.call('UNLINK', due, owners, attempts, reissues)
  local idempotency = redis.call('HGET', job, 'idempotency_key')
  if idempotency then redis.call('UNLINK', idempotency) end
  enter('failed')
end

-- Every record counted once and no more to come: the job has ended.
local function end_if_done()
  if not sealed or ended then return end
  local count = redis.call('HMGET', job, 'records', 'done', 'failed')
  local records, done, failed = tonumber(count[1]), tonumber(count[2]), tonumber(count[3])
  if done + failed < records then return end
  redis.call('HSET', job, 'ended_ms', now)
  redis.call('ZREM', active, ARGV[1])
  enter(failed == 0 and 'completed' or done == 0 and 'failed' or 'completed_with_errors')
end

-- An ended job has something to do again.
local function reopen(new_state)
  redis.call('HDEL', job, 'ended_ms')
  redis.call('ZADD', active, now, ARGV[1])
  if ended then enter(new_state) end
  ended = false
end

-- How many records an input holds; none where there is no input.
local function rows_of(input)
  local count = redis.call('GETRANGE', input, ROWS_AT, ROWS_AT + 3)
  return count == '' and 0 or struct.unpack('<I4', count)
end

-- The records of a chunk whose result Redis lost are to be counted again. Its input holds those that had failed.
local function uncount(chunk, rows, input)
  local failed = rows_of(input)
  redis.call('SETBIT', counted, chunk, 0)
  redis.call('HINCRBY', job, 'chunks_done', -1)
  redis.call('HINCRBY', job, 'done', failed - rows)
  redis.call('HINCRBY', job, 'failed', 0 - failed)  -- not -0, which is no integer to Redis
  reopen('running')
end

-- A chunk leaves the bookkeeping of issued chunks.
local function forget(chunk)
  redis.call('ZREM', due, chunk)
  redis.call('HDEL', owners, chunk)
  redis.call('HDEL', attempts, chunk, chunk .. ':deaths')
  redis.call('HDEL', reissues, chunk)
end

-- Only one producer at a time may add to a job: mine, or whoever comes once a dead one's lease has lapsed.
local function hold(producer, token, lease_ms)
  local holder = redis.call('GET', producer)
  if holder and holder ~= token then return false end
  redis.call('SET', producer, token, 'PX', lease_ms)
  return true
end
