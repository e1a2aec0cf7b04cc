-- The body of a function of `next`: lease the next chunk of a job that is ready, and that this worker may take. Until it
-- has decided, it writes nothing but what it learned of the chunks. An error says that the job is damaged.
-- ARGV: job, token, instance, fingerprint, lease, [what decides the vectors, most bytes]: with these, only a chunk that
-- nobody had yet, of a job that may be in one batch with others.
-- → ok <claim> <kind of its place now> <chunks left, if some are ready there> <work to charge> <weight> <whether the job is small>
--   | over (nothing is ready) | elsewhere <place> <how to list it there> | later (what is ready is left to other workers for
--   now) | more (call again)
if ended then return {'over'} end
if state ~= 'submitting' and state ~= 'queued' and state ~= 'running' then error('has a state that there is not', 0) end
local is_small = (tonumber(facts.added) or 0) <= SMALL_JOB

-- What this script does not need, but others do: the facts of a small job go to the worker. A large one is checked now and
-- then.
if is_small or facts.claims % CHECKED == 0 then
  local more = redis.call('HMGET', job, 'options', unpack(NUMBERS))
  for at, name in ipairs(NUMBERS) do
    local value = more[at + 1]
    if (value or at <= NEEDED) and not (value or ''):find('^%-?%d+$') then
      error('has no ' .. name .. ' that is a number', 0)
    end
  end
  if not pcall(cjson.decode, more[1] or '') then error('has options that are no JSON', 0) end
  redis.call('XLEN', events)
  redis.call('ZCARD', suspects)
  redis.call('HLEN', attempts)
  redis.call('GETBIT', drained, 0)
end
if facts.weight and not ((tonumber(facts.weight) or 0) > 0) then error('has a weight that is no number', 0) end
local token, instance, fingerprint, alike, room = ARGV[2], ARGV[3], ARGV[4], ARGV[6], tonumber(ARGV[7])
local place = place_of(facts)
if not KNOWN_LANES[place.lane] then error('has a lane that there is not', 0) end
local weight, records = weight_of(place.tenant, facts.weight), facts.done + facts.failed
-- What it was listed for: as usual, or apart, where suspects come first.
local is_apart = found.kind == APART .. place.kind
if place.lane ~= found.lane or place.tenant ~= found.tenant or place.queue ~= found.queue
  or (place.kind ~= found.kind and not is_apart) or (place.is_apart and not is_apart) then
  return {'elsewhere', place, list_all}
end
local function is_ready_here()
  local usual = place.first < place.below or redis.call('ZCOUNT', ready, '-inf', now) > 0
  if not is_apart then return usual end
  return (place.is_apart and usual) or has_suspects()
end
-- If it was listed apart for what is left of it, and is trusted again, nobody else has listed it as usual.
if not is_ready_here() then return is_apart and place.is_ready and {'elsewhere', place, list_all} or {'over'} end
if alike and (redis.call('HGET', job, 'alike') ~= alike or place.first >= place.below) then return {'other'} end

-- Whether an instance has chunks of a job; without one, whether any worker has that is not in quarantine.
local function has(id, wanted)
  for _, owner in ipairs(redis.pcall('HVALS', JOB .. id .. ':owners')) do
    local who = owner:match('^%S+ (%S+)')
    if wanted and who == wanted then return true end
    if who and not wanted and not redis.call('ZSCORE', QUEUE_KEY .. place.queue .. ':quarantine', who) then return true end
  end
  return false
end

-- Whether a worker may have chunks of the job now. Jobs that are watched, and those of tenants that are, are not in one
-- worker together, so that its death may tell whose text it was. One that no worker has has its turn once the other had its
-- time; for as long, nothing is given of the other.
local function may_have()
  local is_watched = is_still(job, 'watched_ms')
  if not is_watched and not is_still(faults(), 'watched_ms') then return true end
  local key = WATCHED .. instance
  local other, since, waiting = (redis.call('GET', key) or ''):match('^(%S+) (%d+) ?(%S*)$')
  local is_same = other == ARGV[1]
  if other and not is_same and not (is_watched and is_still(JOB .. other, 'watched_ms')) then
    is_same = (redis.call('HGET', JOB .. other, 'tenant') or TENANT) == place.tenant
  end
  local is_over = other and now - since > WATCHED_MS and waiting ~= '' and not has(waiting)
  if other and (not is_same or is_over) and (has(other, instance) or (is_same and now - since < 2 * WATCHED_MS)) then
    if not has(ARGV[1]) then redis.call('SET', key, other .. ' ' .. since .. ' ' .. ARGV[1], 'KEEPTTL') end
    return false
  end
  if not is_same or is_over then
    found.watched = now_text
  elseif other ~= ARGV[1] then
    found.watched = since .. ' ' .. waiting
  end
  return true
end

-- The input of a chunk if a worker is to encode it; if not, it is forgotten.
local function open(chunk)
  found.input = job .. ':in:' .. chunk
  local input = redis.call('GET', found.input)
  if redis.call('GETBIT', counted, chunk) == 0 then
    if input then return input end
    look_by(now)  -- the audit sees the hole
  end
  forget(chunk)
end

local left_alone = false
-- A chunk that was given back, or whose owner died, its input, and what is known of it: how often it was claimed, deaths of
-- its owners, doubts, and who leaves it to others. One that this worker could not do is left to another, if there is one.
local function given_back(set)
  for _, chunk in ipairs(redis.call('ZRANGEBYSCORE', set, '-inf', now_text, 'LIMIT', '0', READY_LOOKS)) do
    local known = redis.call('HMGET', attempts, chunk, chunk .. ':deaths', chunk .. ':doubts', chunk .. ':not')
    if known[1] and not tonumber(known[1]) then error('has attempts that are no number', 0) end
    local who, until_ms = (known[4] or ''):match('^(%S+) (%d+)$')
    if who == instance and now < tonumber(until_ms)
      and redis.call('ZCOUNT', QUEUE_KEY .. place.queue .. ':workers', now, '+inf') > 1 then
      left_alone = true
    else
      local input = open(chunk)
      if input then
        redis.call('ZREM', set, chunk)
        return chunk, input, known
      end
    end
  end
end

-- The first chunk that nobody had yet, and its input.
local function fresh()
  local chunk, last = place.first, math.min(place.below, place.first + CHUNK_LOOKS)
  while chunk < last do
    local name = string.format('%d', chunk)
    -- After Redis lost writes in a crash, it may have been taken already.
    local input = redis.call('HEXISTS', owners, name) == 0 and open(name)
    chunk = chunk + 1
    if input then
      place.first = chunk
      return name, input
    end
  end
  redis.call('HSET', job, 'next', chunk)
  place.first = chunk
end

found.watched = nil
if place.is_guarded and not is_apart and not may_have() then return {alike and 'other' or 'later'} end
local chunk, input, known
if alike then
  found.input = job .. ':in:' .. place.first
  if room < size_of(found.input) then return {'other'} end
else
  if is_apart then chunk, input, known = given_back(suspects) end
  if not chunk and is_apart == place.is_apart then chunk, input, known = given_back(ready) end
end
if not chunk then
  local later = left_alone or (is_apart and has_suspects())
  if is_apart ~= place.is_apart then return later and {'later'} or {'elsewhere', place_of(read()), list_all} end
  chunk, input = fresh()
  if not chunk then
    return {place.first < place.below and 'more' or alike and 'other' or later and 'later' or 'over'}
  end
  if room and room < size_in(input) then return {'other'} end
end
local attempt, rows, doubts = 1, is_apart and '', false
if known then
  attempt, doubts = (known[1] or 0) + 1, known[3]
  if known[2] then rows = cjson.decode(known[2]).rows end
  if known[4] then redis.call('HDEL', attempts, chunk .. ':not') end
end
-- The work is estimated by the job's records so far, or by its bytes, of which a token has about four.
local work = size_in(input) / 4
if records > 0 and facts.work then work = struct.unpack('<I4', input, ROWS_AT + 1) * facts.work / records end
-- What quarantine takes is charged to nobody.
work = found.in_quarantine and 0 or math.max(1, math.floor(work))
if found.watched then redis.call('SET', WATCHED .. instance, ARGV[1] .. ' ' .. found.watched, 'PX', WATCH_MS) end
-- What was charged for chunks that have ended since the last claim was an estimate too.
local owed = work + (facts.owed or 0)
local written = {'claims', string.format('%d', facts.claims + 1), 'next', string.format('%d', place.first), 'turned_ms', now_text}
if facts.owed then written[7], written[8] = 'owed', string.format('%d', math.min(0, owed)) end
if not facts.model_fingerprint then
  local at = #written
  written[at + 1], written[at + 2], written[at + 3], written[at + 4] = 'model_fingerprint', fingerprint, 'pinned_by', instance
end
-- What comes through quarantine counts for its tenant too.
if is_apart and not facts.distrusted_ms and is_still(faults(), 'distrusted_ms') then
  written[#written + 1], written[#written + 2] = 'distrusted_ms', 0
end
if facts.claims == '0' then written[#written + 1], written[#written + 2] = 'started_ms', now_text end
progress(unpack(written))
lease(chunk, string.format('%s %s %d %d', token, instance, work, attempt), ARGV[5])
if state == 'queued' then enter('running') end
local waited = now - math.max(found.since or now, tonumber(facts.turned_ms) or 0)
local kind = kind_of(facts.precision, fingerprint)
if is_apart and not place.is_apart and place.is_ready then
  list({lane = place.lane, tenant = place.tenant, queue = place.queue, kind = kind}, ARGV[1], place.left, now)
end
return {'ok', {ARGV[1], chunk, attempt, input, rows, doubts, waited}, is_apart and APART .. kind or kind,
  is_ready_here() and place.left - 1, math.max(0, owed), weight, is_small}
