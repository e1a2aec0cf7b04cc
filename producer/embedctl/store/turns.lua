-- Whose turn it is in a queue. A job is listed while it has chunks that are ready: among those of its tenant and lane, by
-- the chunks that are left of it, and by when it was listed. Tenants and lanes are listed by the work that they had,
-- divided by their shares. All of it follows from the jobs, so a list may be lost at any time.
-- A place is a lane, tenant, queue and kind; the kind is what a worker must have: a precision, the version of its
-- chunks, and a fingerprint or `*`.
-- What may kill a worker is listed apart, and given to workers in quarantine as long as there are any.
local function kind_of(precision, fingerprint) return precision .. '/' .. WIRE_VERSION .. ':' .. fingerprint end
local function flows_of(place) return FLOWS .. place.lane .. ':' .. place.queue .. ':' .. place.kind end
local function served_of(place) return SERVED .. place.lane .. ':' .. place.queue end
local function left_of(place) return JOBS_LEFT .. place.lane .. ':' .. place.tenant .. ':' .. place.queue .. ':' .. place.kind end
local function wait_of(place) return JOBS_WAIT .. place.lane .. ':' .. place.tenant .. ':' .. place.queue .. ':' .. place.kind end

-- These keys may expire before their jobs, if nothing happens for long: the reaper's look at a job makes them again.
local function keep(key)
  if redis.call('PTTL', key) < UNENDED_TTL_MS / 2 then redis.call('PEXPIRE', key, UNENDED_TTL_MS) end
end

-- List a job at its place, with as many chunks left, since that time if it is not there yet. A lane that comes back is next. A tenant that comes back has the
-- work that it had, or that of whose turn it was last if that is more: so nothing is saved up.
local function list(place, id, left, since)
  if place.lane ~= 'background' then
    local lanes = LANES .. place.queue
    if not redis.call('ZSCORE', lanes, place.lane) then
      local first = redis.call('ZRANGE', lanes, 0, 0, 'WITHSCORES')[2]
      redis.call('ZADD', lanes, first and first - 1 or 0, place.lane)
    end
    keep(lanes)
  end
  local flows, served = flows_of(place), served_of(place)
  if not redis.call('ZSCORE', flows, place.tenant) then
    local had = tonumber(redis.call('ZSCORE', served, place.tenant) or 0)
    local level = tonumber(redis.call('HGET', LEVELS .. place.queue, place.lane) or 0)
    redis.call('ZADD', flows, math.max(had, level), place.tenant)
  end
  redis.call('SADD', KINDS .. place.queue, place.kind)
  keep(KINDS .. place.queue)
  redis.call('ZADD', left_of(place), left, id)
  redis.call('ZADD', wait_of(place), 'NX', since, id)
  for _, key in ipairs({flows, left_of(place), wait_of(place)}) do keep(key) end
end

local function delist(place, id)
  redis.call('ZREM', left_of(place), id)
  redis.call('ZREM', wait_of(place), id)
end

-- Take a job that takes no more turns off the lists, and its tenant if that was the last one.
local function leave(place, id)
  delist(place, id)
  if redis.call('EXISTS', left_of(place)) == 0 then redis.call('ZREM', flows_of(place), place.tenant) end
end

-- The weight of a tenant is what workers state. A job's own can only lower it.
local function weight_of(tenant, own)
  local stated = redis.pcall('HGET', QUOTA .. tenant, 'weight')
  stated = type(stated) == 'string' and tonumber(stated) or 1  -- what is damaged of a tenant ends none of its jobs
  return math.min(stated, tonumber(own or stated))
end

-- Add work to what a tenant had, in its lists of these kinds, the usual ones and those apart.
local function charge(place, kinds, work)
  local served = served_of(place)
  local had, lists = tonumber(redis.call('ZSCORE', served, place.tenant) or 0), {}
  for _, kind in ipairs(kinds) do
    local usual = kind:sub(1, #APART) == APART and kind:sub(#APART + 1) or kind
    for _, each in ipairs({usual, APART .. usual}) do
      local flows = FLOWS .. place.lane .. ':' .. place.queue .. ':' .. each
      had = math.max(had, tonumber(redis.call('ZSCORE', flows, place.tenant) or 0))
      lists[#lists + 1] = flows
    end
  end
  had = had + work
  for _, flows in ipairs(lists) do redis.call('ZADD', flows, 'XX', had, place.tenant) end
  redis.call('ZADD', served, had, place.tenant)
  keep(served)
end

-- Add work to what a lane had. The background lane has no part of its own.
local function charge_lane(place, work, interactive)
  if place.lane == 'background' then return end
  local part = place.lane == 'interactive' and interactive or 1 - interactive
  redis.call('ZADD', LANES .. place.queue, 'XX', 'INCR', work / part, place.lane)
end

-- Whether jobs of these kinds are listed in a queue. A tenant that has none any more is taken off: a bell would be for
-- nothing.
local function is_listed(queue, kinds)
  for lane in pairs(KNOWN_LANES) do
    for _, kind in ipairs(kinds) do
      local place = {lane = lane, queue = queue, kind = kind}
      repeat
        place.tenant = redis.pcall('ZRANGE', flows_of(place), 0, 0)[1]
        if place.tenant and redis.call('EXISTS', left_of(place)) == 1 then return true end
        if place.tenant then redis.call('ZREM', flows_of(place), place.tenant) end
      until not place.tenant
    end
  end
  return false
end

-- Whether a worker in quarantine takes what is listed apart.
local function has_quarantine(queue, now)
  return redis.call('ZCOUNT', QUEUE_KEY .. queue .. ':quarantine', now, '+inf') > 0
end

-- Ring for a queue: at most so many bells, while fewer wait there than its workers hear soon. One that is lost, or too
-- many, does no harm.
local function ring(queue, most, now)
  local waiting = redis.pcall('LLEN', queue)
  if type(waiting) ~= 'number' then return end  -- the key is another program's
  local heard = BELLS_PER_WORKER * redis.call('ZCOUNT', QUEUE_KEY .. queue .. ':workers', now, '+inf')
  for _ = 1, math.min(most, heard - waiting) do
    local facts = {id = string.format('bell-%.0f-%d', now, redis.call('INCR', BELLS)), queue = cjson.encode(queue):sub(2, -2)}
    redis.call('LPUSH', queue, (BELL:gsub('%$(%l+)', facts)))
  end
  keep(BELLS)
end
