-- Give a worker the chunk of a queue whose turn it is, leased to it; or, for a small chunk that it has, others that may be
-- in one batch with it. Lanes, tenants and jobs take turns.
-- KEYS: the chunks that this token was given, in case that the answer was lost.
-- ARGV: queue, token, instance, fingerprint, lease, part of the interactive lane, precision, 1 if the worker takes jobs
-- that no fingerprint is pinned to, else 0, 1 if it is in quarantine, else 0; [what decides the vectors, most bytes].
-- → ok | none | later (there are chunks, which are left to other workers for now); then jobs that can't be encoded (<job>
--   <why>)…, then claims: <job> <chunk> <attempt> <input> <rows given up or nil> <doubts of earlier owners or nil>
--   <ms that the job waited> [<facts of a small job>]
local queue, token, instance, fingerprint, lease_ms = unpack(ARGV, 1, 5)
local alike, room = ARGV[10], tonumber(ARGV[11])
local kinds = {kind_of(ARGV[7], fingerprint)}
if ARGV[8] == '1' then kinds[2] = kind_of(ARGV[7], '*') end
local time = redis.call('TIME')
local micros = time[1] * 1000000 + time[2]
local now_ms = math.floor(micros / 1000)
local pause = PAUSE .. queue
if ARGV[9] == '1' then
  for at, kind in ipairs(kinds) do kinds[at] = APART .. kind end
elseif not alike and not has_quarantine(queue, now_ms) then
  for at = 1, #kinds do kinds[#kinds + 1] = APART .. kinds[at] end
end
local steps, met, claims, skipped = STEPS, {}, {}, {}

local function facts_of(id)
  if tonumber(redis.call('HGET', JOB .. id, 'added')) > SMALL_JOB then return {} end
  local job = JOB .. id
  return {redis.call('HGETALL', job), redis.call('PTTL', job), redis.call('EXISTS', job .. ':producer')}
end

-- A damaged job ends, so that its people hear of it. If its hash is no hash, it is only taken off the lists.
local function damaged(id, key, what)
  local job, why = JOB .. id, 'damaged: ' .. key .. ' ' .. what
  met[#met + 1] = {id, why}
  if redis.call('TYPE', job).ok ~= 'hash' then return end
  redis.call('HSET', job, 'state', 'failed', 'stopped_by', 'damage', 'trouble', why, 'ended_ms', now_ms)
  redis.call('ZADD', UPKEEP, now_ms, id)
  if redis.call('TYPE', job .. ':events').ok == 'stream' then
    redis.call('XADD', job .. ':events', 'MAXLEN', '~', EVENTS_KEPT, '*', 'state', 'failed')
  end
end

-- Claim a chunk of a job that is listed at a place. Returns what came of it.
local function try(id, place)
  local job = JOB .. id
  local of_job = {job, ACTIVE, job .. ':leases', job .. ':owners', job .. ':attempts', job .. ':ready', job .. ':events',
    job .. ':counted'}
  local args = {id, token, instance, fingerprint, lease_ms, alike, room}
  local fine, answer = pcall(claim, of_job, args, place)
  if not fine and type(answer) == 'table' and answer.key then
    answer = {'damaged', answer.key, answer.what}
  elseif not fine then
    local why = type(answer) == 'table' and answer.err or answer
    why = why:gsub('^@?%S+: ?%d+: ', ''):gsub('^%-', '')
    -- Redis may refuse all writes, which says nothing of the job.
    if why:find('^%u+ ') and not why:find('^WRONGTYPE ') and not why:find('^ERR ') then error(answer, 0) end
    answer = {'damaged', job, why}
  end
  local what = answer[1]
  if what == 'gone' and redis.call('EXISTS', job) == 1 then
    answer = {'damaged', job, 'has no state'}
    what = 'damaged'
  end
  if what == 'later' or what == 'other' then return what end
  if what == 'more' then
    steps = 0
    return what
  end
  local since = tonumber(redis.call('ZSCORE', wait_of(place), id) or now_ms)
  delist(place, id)
  if what == 'elsewhere' then
    answer[3](answer[2], since)
  elseif what == 'version' then
    met[#met + 1] = {id, 'of version ' .. answer[2]}
  elseif what == 'damaged' then
    damaged(id, answer[2], answer[3])
  elseif what == 'ok' then
    local given, now_at, work, weight = unpack(answer, 2, 5)
    local all = place.kind == now_at.kind and kinds or {place.kind, now_at.kind}
    charge(place, all, work / weight)
    if now_at.is_ready then list(now_at, id, now_at.left - 1, since) end
    charge_lane(place, work, ARGV[6])
    if place.lane == 'background' then redis.call('SET', pause, 1, 'PX', BACKGROUND_MS) end
    for _, fact in ipairs(facts_of(id)) do given[#given + 1] = fact end
    claims[#claims + 1] = given
  end
  return what
end

-- The first of a sorted set that is not skipped, and its score.
local function first_of(key)
  local found = redis.call('ZRANGE', key, 0, skipped[0] or 0, 'WITHSCORES')
  for at = 1, #found, 2 do
    if not skipped[key .. found[at]] then return found[at], tonumber(found[at + 1]) end
  end
end

local function skip(key, member)
  skipped[key .. member] = true
  skipped[0] = (skipped[0] or 0) + 1
end

-- The lowest of the first ones at several places: the place, its member and its score.
local function lowest(places, key_of)
  local best, least, score
  for _, place in ipairs(places) do
    local member, at = first_of(key_of(place))
    if member and (not best or at < score) then best, least, score = place, member, at end
  end
  return best, least, score
end

-- Claim the next chunk of a lane. Of each two turns of a tenant, about one is the job's with the fewest chunks left, and
-- one is the job's that has been listed longest, until it is done: so a small job is soon done, and no stream of small ones
-- holds up a large one, however many they are.
local function next_of(lane)
  local lists = {}
  for at, kind in ipairs(kinds) do lists[at] = {lane = lane, queue = queue, kind = kind} end
  while steps > 0 do
    steps = steps - 1
    local _, tenant, had = lowest(lists, flows_of)
    if not tenant then return false end
    local places = {}
    for at, kind in ipairs(kinds) do places[at] = {lane = lane, tenant = tenant, queue = queue, kind = kind} end
    local place, id = lowest(places, micros % 2 == 0 and left_of or wait_of)
    if id then
      local what = try(id, place)
      if what == 'ok' then
        redis.call('HSET', LEVELS .. queue, lane, had)
        redis.call('ZREMRANGEBYSCORE', served_of(place), '-inf', string.format('(%.17g', had))
        keep(LEVELS .. queue)
        return true
      end
      if what == 'later' then
        skip(left_of(place), id)
        skip(wait_of(place), id)
      end
    else
      for at, each in ipairs(places) do
        if redis.call('EXISTS', left_of(each)) == 0 then redis.call('ZREM', flows_of(lists[at]), tenant)
        else skip(flows_of(lists[at]), tenant) end
      end
    end
  end
  return false
end

-- Claim the chunk whose turn it is. The background lane has its turn if nothing else is ready, and once in a pause. A lane
-- that has nothing saves nothing up: when it comes back, it is next.
local function next_chunk()
  if redis.call('EXISTS', pause) == 0 and next_of('background') then return end
  local lanes, empty = LANES .. queue, {}
  local listed = redis.call('ZRANGE', lanes, 0, -1, 'WITHSCORES')
  for at = 1, #listed, 2 do
    if next_of(listed[at]) then
      for _, lane in ipairs(empty) do redis.call('ZADD', lanes, 'XX', listed[at + 1] - 1, lane) end
      return
    end
    empty[#empty + 1] = listed[at]
  end
  next_of('background')
end

-- Claim small chunks that nobody had, in the order of lanes and tenants: they are charged like any other.
local function gather()
  for _, lane in ipairs({'interactive', 'normal', 'background'}) do
    for _, kind in ipairs(kinds) do
      local flows = {lane = lane, queue = queue, kind = kind}
      for _, tenant in ipairs(redis.call('ZRANGE', flows_of(flows), 0, GATHERED - 1)) do
        local place = {lane = lane, tenant = tenant, queue = queue, kind = kind}
        for _, id in ipairs(redis.call('ZRANGE', left_of(place), 0, GATHERED - 1)) do
          if steps == 0 or #claims == GATHERED then return end
          steps = steps - 1
          if try(id, place) == 'ok' then room = room - #claims[#claims][4] end
        end
      end
    end
  end
end

-- What a lost answer had of a chunk.
local function again(id, chunk)
  local job = JOB .. id
  local owner = redis.call('HGET', job .. ':owners', chunk)
  if not owner or owner:match('^%S+') ~= token then return end
  local known = redis.call('HMGET', job .. ':attempts', chunk, chunk .. ':deaths', chunk .. ':doubts')
  local rows = known[2] and cjson.decode(known[2]).rows or (ARGV[9] == '1' and '')
  claims[#claims + 1] = {id, chunk, known[1], redis.call('GET', job .. ':in:' .. chunk), rows, known[3], 0}
end

-- Whether there are jobs that only other workers can encode: one of those must hear the next bell.
local function for_others()
  for _, kind in ipairs(redis.call('SMEMBERS', KINDS .. queue)) do
    local is_there = is_listed(queue, {kind})
    if is_there and kind:sub(1, #APART) ~= APART then return true end
    if not is_there then redis.call('SREM', KINDS .. queue, kind) end
  end
  return false
end

local given = redis.call('GET', KEYS[1])
if given then
  for id, chunk in given:gmatch('(%S+) (%d+)') do again(id, chunk) end
else
  if alike then gather() else next_chunk() end
  local words = {}
  for at, each in ipairs(claims) do words[at] = each[1] .. ' ' .. each[2] end
  if #words > 0 then redis.call('SET', KEYS[1], table.concat(words, ' '), 'PX', GIVEN_MS) end
end
if #claims > 0 then
  if is_listed(queue, kinds) then ring(queue, 1, now_ms) end
  return {'ok', met, unpack(claims)}
end
local later = for_others()
if later then ring(queue, 1, now_ms) end
return {later and steps > 0 and 'later' or 'none', met}
