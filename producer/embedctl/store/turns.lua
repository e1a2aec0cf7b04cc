-- Whose turn it is in a queue. A job is listed while it has chunks that are ready: among those of its tenant and lane, by
-- the chunks that are left of it, and by when it was listed. Tenants and lanes are listed by the work that they had,
-- divided by their shares. All of it follows from the jobs, so a list may be lost at any time.
-- A place is a lane, tenant, queue and kind; the kind is what a worker must have: a precision, the version of its
-- chunks, and a fingerprint or `*`.
-- What may kill a worker is listed apart, and given to workers in quarantine as long as there are any. There,
-- tenants of all lanes are listed by when they came or had their last turn (in microseconds), whatever work that was: what
-- a turn costs is a worker.
-- Times are milliseconds by Redis' own clock, so no host's clock matters.
local time = redis.call('TIME')
local micros = time[1] * 1000000 + time[2]
local now = math.floor(micros / 1000)
-- The same as text. To give Redis a number costs as much as a short command.
local now_text = string.format('%d', now)
local function kind_of(precision, fingerprint)
  return precision .. '/' .. WIRE_VERSION .. ':' .. fingerprint
end

local function left_of(place)
  return JOBS_LEFT .. place.lane .. ':' .. place.tenant .. ':' .. place.queue .. ':' .. place.kind
end

local function wait_of(place)
  return JOBS_WAIT .. place.lane .. ':' .. place.tenant .. ':' .. place.queue .. ':' .. place.kind
end

-- These keys may expire before their jobs, if nothing happens for long: the reaper's look at a job makes them again.
local function keep(key)
  if redis.call('PTTL', key) < UNENDED_TTL_MS / 2 then redis.call('PEXPIRE', key, UNENDED_TTL_MS) end
end

-- The lists of tenants in a queue, of a lane and kinds, or of any; and of what is listed as usual,
-- apart, or both.
local known_lists = {}
local function lists_in(queue, which, kinds, lane)
  local known, found = known_lists[queue], {}
  if not known then
    known = {}
    for _, name in ipairs(redis.call('SMEMBERS', KINDS .. queue)) do
      local lane, kind = name:match('^(%l+):(.+)$')
      local usual = lane and kind:match('^' .. APART .. '(.*)')
      known[#known + 1] = lane and {name = name, lane = lane, kind = kind, queue = queue, is_apart = usual and true,
        usual = usual or kind, flows = FLOWS .. lane .. ':' .. queue .. ':' .. kind}
    end
    known_lists[queue] = known
  end
  for _, each in ipairs(known) do
    if (not lane or each.lane == lane) and (not kinds or kinds[each.usual])
      and which ~= (each.is_apart and 'usual' or 'apart') then found[#found + 1] = each end
  end
  return found
end

local function lies_apart(place)
  return place.kind:sub(1, #APART) == APART
end

local function flows_of(place)
  return FLOWS .. place.lane .. ':' .. place.queue .. ':' .. place.kind
end

-- Name the lists of a place among those of its queue.
local function name_lists(place)
  if redis.call('SADD', KINDS .. place.queue, place.lane .. ':' .. place.kind) == 1 then
    known_lists[place.queue] = nil
    keep(KINDS .. place.queue)
  end
end

-- The work that a tenant had, or that of whose turn it was last if that is more: so nothing is saved up.
local function had_by(place)
  local had = tonumber(redis.call('HGET', LEVELS .. place.queue, place.lane) or 0)
  had = math.max(had, tonumber(redis.call('ZSCORE', SERVED .. place.lane .. ':' .. place.queue, place.tenant) or 0))
  for _, each in ipairs(lists_in(place.queue, 'usual', nil, place.lane)) do
    had = math.max(had, tonumber(redis.call('ZSCORE', each.flows, place.tenant) or 0))
  end
  return had
end

-- List a job at its place, with as many chunks left, since that time if it is not there yet. A lane that comes back is
-- next.
local function list(place, id, left, since)
  local lanes, flows = LANES .. place.queue, flows_of(place)
  if place.lane ~= 'background' and not redis.call('ZSCORE', lanes, place.lane) then
    local first = redis.call('ZRANGE', lanes, 0, 0, 'WITHSCORES')[2]
    redis.call('ZADD', lanes, first and first - 1 or 0, place.lane)
    keep(lanes)
  end
  if not redis.call('ZSCORE', flows, place.tenant) then
    redis.call('ZADD', flows, lies_apart(place) and micros or had_by(place), place.tenant)
    keep(flows)
  end
  name_lists(place)
  if redis.call('ZADD', wait_of(place), 'NX', since, id) == 1 then keep(wait_of(place)) end
  if redis.call('ZADD', left_of(place), left, id) == 1 then keep(left_of(place)) end
  -- What is there already is kept now and then.
  for _, key in ipairs(micros % 16 == 0 and {lanes, LEVELS .. place.queue, KINDS .. place.queue, flows, left_of(place), wait_of(place)} or {}) do
    keep(key)
  end
end

local function delist(place, id)
  redis.call('ZREM', left_of(place), id)
  redis.call('ZREM', wait_of(place), id)
end

-- Take a tenant off a list in which it has no job any more, and note what it had if that is more than a tenant has that
-- comes new.
local function go(place)
  local flows, served = flows_of(place), SERVED .. place.lane .. ':' .. place.queue
  local had = not lies_apart(place) and redis.call('ZSCORE', flows, place.tenant)
  redis.call('ZREM', flows, place.tenant)
  if had and redis.call('ZADD', served, 'GT', had, place.tenant) == 1 then keep(served) end
  redis.call('ZREMRANGEBYSCORE', served, '-inf', '(' .. (redis.call('HGET', LEVELS .. place.queue, place.lane) or 0))
end

-- Take a job that takes no more turns off the lists, and its tenant if that was the last one.
local function leave(place, id)
  delist(place, id)
  if redis.call('EXISTS', left_of(place)) == 0 then go(place) end
end

-- The weight of a tenant is what workers state. A job's own can only lower it.
local function weight_of(tenant, own)
  local stated = redis.pcall('HGET', QUOTA .. tenant, 'weight')
  stated = type(stated) == 'string' and tonumber(stated) or 1  -- what is damaged of a tenant ends none of its jobs
  return math.min(stated, tonumber(own or stated))
end

-- Add work to what a tenant had, in its usual lists of these kinds. What it had may be known for some of the lists, and is
-- false for one that it is not in.
local function charge(place, kinds, work)
  local had, lists = false, lists_in(place.queue, 'usual', kinds, place.lane)
  for _, each in ipairs(lists) do
    local score = each.had
    if score == nil then score = tonumber(redis.call('ZSCORE', each.flows, place.tenant) or nil) end
    if score then had = math.max(had or score, score) end
    each.score = score
  end
  local served = SERVED .. place.lane .. ':' .. place.queue
  local sum = (had or place.had or tonumber(redis.call('ZSCORE', served, place.tenant) or 0)) + math.ceil(work)
  sum = string.format('%d', sum)  -- a whole number costs Redis less
  for _, each in ipairs(lists) do
    if each.score then redis.call('ZADD', each.flows, sum, place.tenant) end
  end
  if not had and redis.call('ZADD', served, sum, place.tenant) == 1 then keep(served) end
end

-- Add work to what a lane had. The background lane has no part of its own.
local function charge_lane(place, work, interactive)
  if place.lane == 'background' then return end
  local part = place.lane == 'interactive' and interactive or 1 - interactive
  redis.call('ZADD', LANES .. place.queue, 'XX', 'INCR', string.format('%d', math.ceil(work / part)), place.lane)
end

-- Whether jobs are in one of these lists. A tenant that has none any more is taken off: a bell would be for nothing.
local function is_listed(lists)
  for _, each in ipairs(lists) do
    repeat
      local tenant = redis.pcall('ZRANGE', each.flows, '0', '0')[1]
      local place = tenant and {lane = each.lane, tenant = tenant, queue = each.queue, kind = each.kind}
      if place and redis.call('EXISTS', left_of(place)) == 1 then return true end
      if place then go(place) end
    until not place
  end
  return false
end

-- Whether a worker in quarantine takes what is listed apart.
local guarded = {}
local function has_quarantine(queue)
  if guarded[queue] == nil then
    guarded[queue] = redis.call('ZCOUNT', QUEUE_KEY .. queue .. ':quarantine', now_text, '+inf') > 0
  end
  return guarded[queue]
end

-- Ring for a queue: at most so many bells, while fewer wait there than its workers hear soon. One that is lost, or too
-- many, does no harm.
local function ring(queue, most)
  local waiting = redis.pcall('LLEN', queue)
  if type(waiting) ~= 'number' then return end  -- the key is another program's
  local heard = BELLS_PER_WORKER * redis.call('ZCOUNT', QUEUE_KEY .. queue .. ':workers', now_text, '+inf')
  for _ = 1, math.min(most, heard - waiting) do
    local id = string.format('bell-%.0f-%d', now, redis.call('INCR', BELLS))
    redis.call('LPUSH', queue, string.format(BELL, id, id, id, cjson.encode(queue):sub(2, -2), id))
    keep(BELLS)
  end
end
