-- The body of a function of `next`: lease the next chunk of a job that is ready, and that this worker may take. Until it
-- has decided, it writes nothing but what it learned of the chunks.
-- ARGV: job, token, instance, fingerprint, lease, [what decides the vectors, most bytes]: with these, only a chunk that
-- nobody had yet, of a job that may be in one batch with others.
-- → ok <claim> <place> <work> <weight> | over (nothing is ready) | elsewhere <place> <how to list it there> | later (what is
--   ready is left to other workers for now) | more (call again) | damaged <key> <what>
if ended then return {'over'} end
for key, kind in pairs({[leases] = 'zset', [ready] = 'zset', [owners] = 'hash', [attempts] = 'hash', [counted] = 'string',
  [events] = 'stream', [drained] = 'string', [suspects] = 'zset'}) do
  local is = redis.call('TYPE', key).ok
  if is ~= 'none' and is ~= kind then return {'damaged', key, 'is a ' .. is .. ', not a ' .. kind} end
end
local token, instance, fingerprint, alike, room = ARGV[2], ARGV[3], ARGV[4], ARGV[6], tonumber(ARGV[7])
local place = place_of_job()
if not KNOWN_LANES[place.lane] then return {'damaged', job, 'has a lane that there is not'} end
if state ~= 'submitting' and state ~= 'queued' and state ~= 'running' then
  return {'damaged', job, 'has a state that there is not'}
end
local more = redis.call('HMGET', job, 'alike', 'weight', 'work', 'options', unpack(NUMBERS))
for at, name in ipairs(NUMBERS) do
  local value = more[at + 4]
  if not value and at <= NEEDED then return {'damaged', job, 'has no ' .. name} end
  if value and not value:find('^%-?%d+$') then return {'damaged', job, 'has a ' .. name .. ' that is no number'} end
end
if more[2] and not ((tonumber(more[2]) or 0) > 0) then return {'damaged', job, 'has a weight that is no number'} end
if not pcall(cjson.decode, more[4] or '') then return {'damaged', job, 'has options that are no JSON'} end
local weight, records = weight_of(place.tenant, more[2]), more[5] + more[6]
-- What it was listed for: as usual, or apart, where suspects come first.
local is_apart = found.kind == APART .. place.kind
if place.lane ~= found.lane or place.tenant ~= found.tenant or place.queue ~= found.queue
  or (place.kind ~= found.kind and not is_apart) or (place.is_apart and not is_apart) then
  return {'elsewhere', place, list_all}
end
local function is_ready_here()
  local usual = place.first < place.below or redis.call('ZCOUNT', ready, '-inf', now) > 0
  if not is_apart then return usual end
  return (place.is_apart and usual) or redis.call('ZCOUNT', suspects, '-inf', now + SUSPECT_MS) > 0
end
-- If it was listed apart for what is left of it, and is trusted again, nobody else has listed it as usual.
if not is_ready_here() then return is_apart and place.is_ready and {'elsewhere', place, list_all} or {'over'} end
if alike and (more[1] ~= alike or place.first >= place.below) then return {'other'} end

-- Whether a worker is to encode the chunk; if it is not, it is forgotten.
local function is_open(chunk)
  if redis.call('EXISTS', job .. ':out:' .. chunk) == 0 and redis.call('GETBIT', counted, chunk) == 0
    and not is_drained(chunk) then
    local input = job .. ':in:' .. chunk
    local is = redis.call('TYPE', input).ok
    if is == 'string' then return true end
    if is ~= 'none' then error({key = input, what = 'is a ' .. is .. ', not a string'}) end
    look_by(now)  -- the audit sees the hole
  end
  forget(chunk)
  return false
end

local left_alone = false
-- A chunk that was given back, or whose owner died. One that this worker could not do is left to another, if there is one.
local function given_back(set)
  for _, chunk in ipairs(redis.call('ZRANGEBYSCORE', set, '-inf', now, 'LIMIT', 0, READY_LOOKS)) do
    local who, until_ms = (redis.call('HGET', attempts, chunk .. ':not') or ''):match('^(%S+) (%d+)$')
    if who == instance and now < tonumber(until_ms)
      and redis.call('ZCOUNT', QUEUE_KEY .. place.queue .. ':workers', now, '+inf') > 1 then
      left_alone = true
    elseif is_open(chunk) then
      return chunk
    end
  end
end

-- The first chunk that nobody had yet.
local function fresh()
  local chunk, last = place.first, math.min(place.below, place.first + CHUNK_LOOKS)
  while chunk < last do
    -- After Redis lost writes in a crash, it may have been taken already.
    local had = redis.call('ZSCORE', leases, chunk) or redis.call('ZSCORE', ready, chunk)
      or redis.call('ZSCORE', suspects, chunk)
    if not had and is_open(chunk) then return chunk end
    chunk = chunk + 1
  end
  redis.call('HSET', job, 'next', chunk)
  place.first = chunk
end

local chunk
if alike then
  if room < size_of(job .. ':in:' .. place.first) or redis.call('HEXISTS', attempts, place.first) == 1 then
    return {'other'}
  end
else
  chunk = is_apart and given_back(suspects)
  if not chunk and is_apart == place.is_apart then chunk = given_back(ready) end
end
if not chunk then
  local later = left_alone or (is_apart and place.has_suspects)
  if is_apart ~= place.is_apart then return later and {'later'} or {'elsewhere', place_of_job(), list_all} end
  chunk = fresh()
  if not chunk then
    return {place.first < place.below and 'more' or alike and 'other' or later and 'later' or 'over'}
  end
  if room and room < size_of(job .. ':in:' .. chunk) then return {'other'} end
  place.first = chunk + 1
  redis.call('HSET', job, 'next', place.first)
end
redis.call('ZREM', ready, chunk)
redis.call('ZREM', suspects, chunk)
local input = redis.call('GET', job .. ':in:' .. chunk)
-- The work is estimated by the job's records so far, or by its bytes, of which a token has about four.
local work = size_in(input) / 4
if records > 0 and more[3] then work = rows_of(job .. ':in:' .. chunk) * more[3] / records end
work = math.max(1, math.floor(work))
redis.call('HSETNX', job, 'model_fingerprint', fingerprint)
redis.call('HSETNX', job, 'pinned_by', instance)
redis.call('HSET', owners, chunk, token .. ' ' .. instance .. ' ' .. work)
lease(chunk, ARGV[5])
redis.call('HINCRBY', job, 'claims', 1)
redis.call('HSETNX', job, 'started_ms', now)
local attempt = redis.call('HINCRBY', attempts, chunk, 1)
redis.call('HDEL', attempts, chunk .. ':not')
if state == 'queued' then enter('running') end
progress()
local known = redis.call('HMGET', attempts, chunk .. ':deaths', chunk .. ':doubts')
local listed, turned = redis.call('ZSCORE', wait_of(found), ARGV[1]), redis.call('HGET', job, 'turned_ms')
local waited = now - math.max(tonumber(listed) or now, tonumber(turned) or 0)
redis.call('HSET', job, 'turned_ms', now)
local rows = known[1] and cjson.decode(known[1]).rows or (is_apart and '')
place.kind = place.kind:match('^[^:]+:') .. fingerprint
if is_apart and not place.is_apart and place.is_ready then list(place, ARGV[1], place.left, now) end
place.is_ready = is_ready_here()
if is_apart then place.kind = APART .. place.kind end
return {'ok', {ARGV[1], chunk, attempt, input, rows, known[2], waited}, place, work, weight}
