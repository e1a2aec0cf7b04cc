-- Give a worker the chunk of a queue whose turn it is, leased to it; or, for a small chunk that it has, others that may be
-- in one batch with it. Lanes, tenants and jobs take turns.
-- KEYS: the chunks that this token was given, in case that the answer was lost.
-- ARGV: queue, token, instance, fingerprint, lease, part of the interactive lane, precision, 1 if the worker takes jobs
-- that no fingerprint is pinned to, else 0, 1 if it is in quarantine, else 0; [what decides the vectors, most bytes].
-- → ok | none | later (there are chunks, which are left to other workers for now); then jobs that can't be encoded (<job>
--   <why>)…, then claims: <job> <chunk> <attempt> <input> <rows given up or nil> <doubts of earlier owners or nil>
--   <ms that the job waited> [<facts of a small job>]
local queue, token, instance, fingerprint, lease_ms = unpack(ARGV, 1, 5)
local in_quarantine, alike, room = ARGV[9] == '1', ARGV[10], tonumber(ARGV[11])
local kinds = {[kind_of(ARGV[7], fingerprint)] = true, [kind_of(ARGV[7], '*')] = ARGV[8] == '1'}
local which = in_quarantine and 'apart' or (alike or has_quarantine(queue)) and 'usual' or 'both'
local pause = PAUSE .. queue
local steps, moved, met, claims, goes_on, skipped, are_lanes = STEPS, 0, {}, {}, false, {}, true

-- The key of a job that is of another type than it should be, and that type.
local function of_wrong_type(job, input)
  local kinds = {[job] = 'hash', [job .. ':owners'] = 'hash', [job .. ':attempts'] = 'hash',
    [job .. ':ready'] = 'zset', [job .. ':suspects'] = 'zset', [job .. ':counted'] = 'string',
    [job .. ':out:drained'] = 'string', [job .. ':events'] = 'stream'}
  if input then kinds[input] = 'string' end
  for key, kind in pairs(kinds) do
    local is = redis.call('TYPE', key).ok
    if is ~= 'none' and is ~= kind then return key, 'is a ' .. is .. ', not a ' .. kind end
  end
end

-- A damaged job ends, so that its people hear of it. If its hash is no hash, it is only taken off the lists.
local function damaged(id, key, what)
  local job, why = JOB .. id, 'damaged: ' .. key .. ' ' .. what
  met[#met + 1] = {id, why}
  if redis.call('TYPE', job).ok ~= 'hash' then return end
  redis.call('HSET', job, 'state', 'failed', 'stopped_by', 'damage', 'trouble', why, 'ended_ms', now)
  redis.call('ZADD', UPKEEP, now, id)
  if redis.call('TYPE', job .. ':events').ok == 'stream' then
    redis.call('XADD', job .. ':events', 'MAXLEN', '~', EVENTS_KEPT, '*', 'state', 'failed')
  end
end

-- Claim a chunk of a job that is listed at a place. Returns what came of it.
local function try(id, place, since)
  local job = JOB .. id
  place.input, place.since = nil, since or tonumber(redis.call('ZSCORE', wait_of(place), id) or now)
  place.in_quarantine = in_quarantine
  local fine, answer = pcall(claim, {job}, {id, token, instance, fingerprint, lease_ms, alike, room}, place)
  if not fine then
    local why = type(answer) == 'table' and answer.err or answer
    why = why:gsub('^@?%S+: ?%d+: ', ''):gsub('^%-', '')
    -- Redis may refuse all writes, which says nothing of the job.
    if why:find('^%u+ ') and not why:find('^WRONGTYPE ') and not why:find('^ERR ') then error(answer, 0) end
    local key, is = of_wrong_type(job, place.input)
    answer = {'damaged', key or job, is or why}
  elseif answer[1] == 'gone' and redis.call('EXISTS', job) == 1 then
    answer = {'damaged', job, 'has no state'}
  end
  local what = answer[1]
  if what == 'more' then steps = 0 end
  if what == 'later' or what == 'other' or what == 'more' then return what end
  if what ~= 'ok' then
    delist(place, id)
    if what == 'elsewhere' then answer[3](answer[2], place.since) end
    if what == 'version' then met[#met + 1] = {id, 'of version ' .. answer[2]} end
    if what == 'damaged' then damaged(id, answer[2], answer[3]) end
    return what
  end
  local given, kind, left, work, weight, is_small = unpack(answer, 2, 7)
  if work > 0 then charge(place, kinds, work / weight) end
  if are_lanes then charge_lane(place, work, ARGV[6]) end
  if place.is_apart then  -- the others there are next
    for _, each in ipairs(lists_in(queue, 'apart', kinds)) do redis.call('ZADD', each.flows, 'XX', micros, place.tenant) end
  end
  if left and kind == place.kind then
    redis.call('ZADD', left_of(place), string.format('%d', left), id)
  else
    delist(place, id)
    if left then list({lane = place.lane, tenant = place.tenant, queue = queue, kind = kind}, id, left, place.since) end
  end
  if place.lane == 'background' then redis.call('SET', pause, 1, 'PX', BACKGROUND_MS) end
  if is_small then
    given[8], given[9], given[10] = redis.call('HGETALL', job), redis.call('PTTL', job), redis.call('EXISTS', job .. ':producer')
  end
  claims[#claims + 1], goes_on = given, goes_on or left
  return what
end

-- The first of a sorted set that is not skipped, and its score.
local function first_of(key)
  local found = redis.call('ZRANGE', key, '0', skipped[0] or '0', 'WITHSCORES')
  for at = 1, #found, 2 do
    if not skipped[0] or not skipped[key .. found[at]] then return found[at], tonumber(found[at + 1]) end
  end
end

local function skip(key, member)
  skipped[key .. member] = true
  skipped[0] = (skipped[0] or 0) + 1
end

-- Claim the next chunk of a lane, or of any. Of each two turns of a tenant, about one is the job's with the fewest chunks
-- left, and one is the job's that has been listed longest, until it is done: so a small job is soon done, and no stream of
-- small ones holds up a large one, however many they are.
local function next_of(lane)
  while steps > 0 do
    steps = steps - 1
    local lists = lists_in(queue, which, kinds, lane)  -- anew: a job may have been listed elsewhere
    local tenant, had
    for _, each in ipairs(lists) do
      each.tenant, each.had = first_of(each.flows)
      -- It is listed apart by when it came, which says nothing beside usual lists.
      if each.tenant and which == 'both' and each.is_apart then each.had = had_by(each) end
      if each.tenant and (not had or each.had < had) then tenant, had = each.tenant, each.had end
    end
    if not tenant then return false end
    local is_by_wait = micros % 2 == 1
    local place, id, least
    for _, each in ipairs(lists) do
      -- A tenant has had the same in all of its usual lists, so it is in none whose first one had more.
      local is_first, is_possible = each.tenant == tenant, each.had == had
      if is_first or is_possible then
        each.tenant, each.had = tenant, is_first and not in_quarantine and each.had or nil
        local first, score = first_of(is_by_wait and wait_of(each) or left_of(each))
        if first and (not id or score < least) then place, id, least = each, first, score end
      else
        each.tenant, each.had = nil, false
      end
    end
    if id then
      local what = try(id, place, is_by_wait and least)
      if what == 'ok' then
        if not in_quarantine and redis.call('HSET', LEVELS .. queue, lane, string.format('%d', had)) == 1 then
          keep(LEVELS .. queue)
        end
        return true
      end
      if what == 'later' then
        skip(left_of(place), id)
        skip(wait_of(place), id)
      elseif what == 'elsewhere' then
        -- All jobs of a tenant that is distrusted are to be listed apart. Nobody else waits for that.
        moved = moved + 1
        for _, each in ipairs(moved % MOVED == 0 and lists or {}) do
          if each.tenant then skip(each.flows, tenant) end
        end
      end
    else
      for _, each in ipairs(lists) do
        if each.tenant and redis.call('EXISTS', left_of(each)) == 0 then go(each)
        elseif each.tenant then skip(each.flows, tenant) end
      end
    end
  end
  return false
end

-- Claim the chunk whose turn it is. The background lane has its turn if nothing else is ready, and once in a pause. A lane
-- that has nothing saves nothing up: when it comes back, it is next. While there is one lane, nobody has to know what it had.
local function next_chunk()
  local sole, has_background
  are_lanes = false
  for _, each in ipairs(lists_in(queue, 'both')) do
    if each.lane == 'background' then has_background = true
    elseif sole and each.lane ~= sole then are_lanes = true
    else sole = each.lane end
  end
  if in_quarantine then return next_of() end
  if has_background and redis.call('EXISTS', pause) == 0 and next_of('background') then return end
  local lanes, empty = LANES .. queue, {}
  local listed = are_lanes and redis.call('ZRANGE', lanes, '0', '-1', 'WITHSCORES') or sole and {sole, 0} or {}
  for at = 1, #listed, 2 do
    if next_of(listed[at]) then
      for _, lane in ipairs(empty) do redis.call('ZADD', lanes, 'XX', listed[at + 1] - 1, lane) end
      return
    end
    empty[#empty + 1] = listed[at]
  end
  next_of('background')
end

local given = redis.call('GET', KEYS[1])
if given then
  for id, chunk in given:gmatch('(%S+) (%d+)') do
    local job = JOB .. id
    local who, attempt = (redis.call('HGET', job .. ':owners', chunk) or ''):match('^(%S+) %S+ %S+ (%d+)')
    if who == token then
      local known = redis.call('HMGET', job .. ':attempts', chunk .. ':deaths', chunk .. ':doubts')
      local rows = known[1] and cjson.decode(known[1]).rows or (in_quarantine and '')
      claims[#claims + 1] = {id, chunk, attempt, redis.call('GET', job .. ':in:' .. chunk), rows, known[2], 0}
    end
  end
else
  if alike then
    -- Claim small chunks that nobody had, in the order of lanes and tenants: they are charged like any other.
    local function gather()
      for _, lane in ipairs({'interactive', 'normal', 'background'}) do
        for _, each in ipairs(lists_in(queue, which, kinds, lane)) do
          for _, tenant in ipairs(redis.call('ZRANGE', each.flows, '0', GATHERED - 1)) do
            each.tenant = tenant
            for _, id in ipairs(redis.call('ZRANGE', left_of(each), '0', GATHERED - 1)) do
              if steps == 0 or #claims == GATHERED then return end
              steps = steps - 1
              if try(id, each) == 'ok' then room = room - #claims[#claims][4] end
            end
          end
        end
      end
    end
    gather()
  else
    next_chunk()
  end
  local words = {}
  for at, each in ipairs(claims) do words[at] = each[1] .. ' ' .. each[2] end
  if #words > 0 then redis.call('SET', KEYS[1], table.concat(words, ' '), 'PX', GIVEN_MS) end
end
local answer = 'ok'
if #claims > 0 then
  goes_on = goes_on or is_listed(lists_in(queue, which, kinds))
else
  answer = 'none'
  -- There may be jobs that only other workers can encode: one of those must hear the next bell.
  for _, each in ipairs(lists_in(queue, 'both')) do
    local is_there = is_listed({each})
    goes_on = is_there and not each.is_apart
    if goes_on then
      answer = steps > 0 and 'later' or 'none'
      break
    end
    if not is_there then redis.call('SREM', KINDS .. queue, each.name) end
  end
end
if goes_on then ring(queue, 1) end
return {answer, met, unpack(claims)}
