-- Choose the chunks whose tickets the caller sends now, of any job of a queue: lanes, tenants and jobs take turns.
-- Other scripts know nothing of the sorted sets that say whose turn it is. They follow from the jobs, and what is
-- missing or out of date in them is mended when it is met.
-- KEYS: live workers of the queue, its lanes, its issued chunks, its small issued chunks, pause of its background lane.
-- ARGV: job or '', chunk of the job whose ticket is over or '', queue, tickets per worker, reissue after, part of the
-- interactive lane.
-- → ok (<job> <chunk>)…
local workers, lanes, large, small, pause = unpack(KEYS)
local own, over, queue = ARGV[1], ARGV[2], ARGV[3]
local per_worker, reissue_ms, part = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local live = redis.call('ZCOUNT', workers, now, '+inf')
local part_of = {interactive = part, normal = 1 - part}
local over_states = {completed = true, completed_with_errors = true, failed = true, cancelled = true}
local steps, checks = 1000, CHECKED

local function flows_of(lane) return FLOWS .. lane .. ':' .. queue end
local function jobs_of(job) return FLOW .. job.lane .. ':' .. job.tenant .. ':' .. queue end

-- These keys may expire earlier than jobs: then the reaper's look at the jobs makes them again.
local function keep(key, keep_ms)
  if redis.call('PTTL', key) < keep_ms / 2 then redis.call('PEXPIRE', key, keep_ms) end
end

-- What is known of a job that wants tickets; nil if it wants none now.
local known = {}
local function wanting(id)
  if known[id] then return known[id].first < known[id].added and known[id] or nil end
  local key = JOB .. id
  local facts = redis.call('HMGET', key, 'state', 'version', 'ttl_ms', 'next', 'added', 'window', 'resumed_to',
    'resumed_by', 'results_high_water', 'result_bytes', 'drained_next', 'data', 'tenant', 'lane', 'weight')
  if not facts[1] or over_states[facts[1]] or tonumber(facts[2]) ~= WIRE_VERSION then return nil end
  local first, added = tonumber(facts[4]), tonumber(facts[5])
  -- A stopped job that is resumed has no text yet for the chunks that its producer has not reached.
  if facts[7] and redis.call('GET', key .. ':producer') == facts[8] then added = tonumber(facts[7]) end
  if first >= added then return nil end
  -- It waits for its drainer. The chunk that the drainer waits for is issued in any case.
  if facts[9] and tonumber(facts[10] or 0) > tonumber(facts[9]) and first > tonumber(facts[11] or 0) then return nil end
  local window = math.max(tonumber(facts[6]), live * per_worker)
  local life_ms = math.max(tonumber(facts[3]), UNENDED_TTL_MS)
  local job = {
    id = id, key = key, first = first, added = added, window = window, drains = facts[9],
    outside = facts[12], tenant = facts[13] or TENANT, lane = facts[14] or LANE, weight = tonumber(facts[15] or 1),
    life_ms = life_ms, keep_ms = math.floor(life_ms * CHUNK_TTL_FACTOR),
  }
  if not job.drains then known[id] = job end
  return job
end

-- Make the reaper look at a job at this time or earlier; see the prelude of the other scripts.
local function look_by(job, at)
  if redis.call('ZADD', UPKEEP, 'LT', at, job.id) == 0 then return end
  if redis.call('PTTL', UPKEEP) >= (job.life_ms + job.keep_ms) / 2 then return end
  for _, shared in ipairs({ACTIVE, JOBS, BIRTH, UPKEEP}) do
    if redis.call('PTTL', shared) < job.keep_ms then redis.call('PEXPIRE', shared, job.keep_ms) end
  end
end

-- A job that wants tickets, with the chunk to issue and its bytes; nil if it has none.
local function ready(id)
  local job = wanting(id)
  if not job then return nil end
  local chunk = job.first
  while chunk < job.added and steps > 0 do
    steps = steps - 1
    -- After Redis lost writes in a crash, an older ticket may have led to a claim or a result of this chunk already.
    if not redis.call('ZSCORE', job.key .. ':due', chunk) and redis.call('EXISTS', job.key .. ':out:' .. chunk) == 0
      and not (job.drains and redis.call('GETBIT', job.key .. ':out:drained', chunk) == 1) then
      local input = job.key .. ':in:' .. chunk
      local head = job.outside and redis.call('GETRANGE', input, 0, SIZE_AT + 8) or ''
      local elsewhere = #head > SIZE_AT + 8 and head:byte(KIND_AT + 1) > ELSEWHERE
      job.chunk, job.bytes = chunk, elsewhere and struct.unpack('<I8', head, SIZE_AT + 1) or redis.call('STRLEN', input)
      return job
    end
    chunk = chunk + 1
  end
  redis.call('HSET', job.key, 'next', chunk)
  job.first = chunk
  if chunk < job.added then look_by(job, now) end
  return nil
end

-- Let a lane or a tenant take turns. One that comes back is next, and has nothing saved up.
local function join(set, member, keep_ms)
  if not redis.call('ZSCORE', set, member) then
    local first = redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')[2]
    redis.call('ZADD', set, first and first - 1 or 0, member)
  end
  keep(set, keep_ms)
end

-- Put a job among those of its tenant and lane. Jobs with less to do come first; each second without a turn counts as
-- a chunk, and more than LONGEST_WAIT_S chunks as that many. Many turns may be in one millisecond.
local function enlist(job, flag)
  local order = time[1] + time[2] / 1000000 + math.min(job.added - job.first, LONGEST_WAIT_S)
  redis.call('ZADD', jobs_of(job), flag, order, job.id)
  keep(jobs_of(job), job.keep_ms)
end

-- The next job of a lane; nil if none is ready.
local function next_of(lane)
  local flows = flows_of(lane)
  while steps > 0 do
    local tenant = redis.call('ZRANGE', flows, 0, 0)[1]
    if not tenant then return nil end
    local jobs = jobs_of({lane = lane, tenant = tenant})
    local id = redis.call('ZRANGE', jobs, 0, 0)[1]
    if id then
      local fine, job = pcall(ready, id)
      if not fine then  -- another program may have written the job's keys, and the other jobs go on
        local why = type(job) == 'table' and job.err or job
        if id == own or why:find('OOM') then error(job, 0) end
        job = nil
      end
      if job then return job end
      steps = steps - 1
      redis.call('ZREM', jobs, id)
    else
      redis.call('ZREM', flows, tenant)
    end
  end
end

-- The job whose turn it is; nil if none is ready. The background lane has its turn if nothing else is ready, and at
-- least once in a pause.
local function next_job()
  if redis.call('EXISTS', flows_of('background')) == 1 and redis.call('EXISTS', pause) == 0 then
    local job = next_of('background')
    if job then return job end
  end
  while steps > 0 do
    local lane = redis.call('ZRANGE', lanes, 0, 0)[1]
    if not lane then return next_of('background') end
    local job = next_of(lane)
    if job then return job end
    if steps > 0 then redis.call('ZREM', lanes, lane) end
  end
end

-- Whether an issued chunk is still on its way through the queue or a worker. One that was given back, refused, or not
-- taken for long takes up no room, and neither does one whose ticket is not in the queue and was not claimed soon.
local function is_out(entry)
  local id, chunk = entry:match('^([^:]+):(%d+)$')
  if not id then return false end
  local key = JOB .. id
  local due_at = tonumber(redis.pcall('ZSCORE', key .. ':due', chunk) or nil)
  if not due_at then return false end
  if type(redis.pcall('HGET', key .. ':owners', chunk)) == 'string' then return true end
  if due_at % 1 == 0 or redis.pcall('HGET', key .. ':reissues', chunk) then return false end
  return now < due_at - reissue_ms + CLAIMED_AFTER_MS or redis.pcall('LLEN', queue) ~= 0
end

-- Whether fewer chunks of a queue are on their way than a window. If nothing else made room, the oldest are checked:
-- those that are not on their way any more leave the set, and the others wait for their next check at its end.
local function has_room(set, most, made_room)
  while redis.call('ZCARD', set) >= most do
    if checks == 0 or (made_room and checks == CHECKED) then return false end
    local oldest = redis.call('ZRANGE', set, 0, 0)[1]
    if is_out(oldest) then
      redis.call('ZADD', set, now, oldest)
      checks = checks - 1
    else
      redis.call('ZREM', set, oldest)
      checks = math.min(checks, CHECKED - 1)
    end
  end
  return true
end

-- Whether some issued chunks of a job whose window is full are not on their way: then the others do not wait for it.
local function is_stuck(job)
  for _, range in ipairs({{0, CHECKED / 2 - 1}, {-CHECKED / 2, -1}}) do
    for _, chunk in ipairs(redis.call('ZRANGE', job.key .. ':due', unpack(range))) do
      if not is_out(job.id .. ':' .. chunk) then return true end
    end
  end
  return false
end

local function issue(job, set)
  job.first = job.chunk + 1
  redis.call('HSET', job.key, 'next', job.first)
  redis.call('ZADD', job.key .. ':due', now + reissue_ms + 0.5, job.chunk)  -- 0.5: a ticket is on its way
  redis.call('PEXPIRE', job.key .. ':due', job.keep_ms)
  look_by(job, now + reissue_ms)
  redis.call('ZADD', set, now, job.id .. ':' .. job.chunk)
  keep(set, job.keep_ms)
  local flows = flows_of(job.lane)
  redis.call('ZADD', flows, redis.call('ZSCORE', flows, job.tenant) + job.bytes / job.weight, job.tenant)
  if job.lane == 'background' then
    redis.call('SET', pause, 1, 'PX', BACKGROUND_MS)
  else
    redis.call('ZADD', lanes, redis.call('ZSCORE', lanes, job.lane) + job.bytes / part_of[job.lane], job.lane)
  end
  if job.first < job.added then enlist(job, 'XX') else redis.call('ZREM', jobs_of(job), job.id) end
end

local mine = own ~= '' and wanting(own)
if mine then
  if mine.lane ~= 'background' then join(lanes, mine.lane, mine.keep_ms) end
  join(flows_of(mine.lane), mine.tenant, mine.keep_ms)
  enlist(mine, 'NX')
end
if over ~= '' and not is_out(own .. ':' .. over) then
  redis.call('ZREM', large, own .. ':' .. over)
  redis.call('ZREM', small, own .. ':' .. over)
end
local answer = {'ok'}
while true do
  local job = next_job()
  if not job then break end
  local is_small = job.bytes <= SMALL
  local set, made_room = is_small and small or large, #answer > 1
  if not has_room(set, job.window * (is_small and SMALL_FACTOR or 1), made_room) then break end
  if redis.call('ZCARD', job.key .. ':due') >= job.window then
    -- It keeps its turn: those that are on their way make room soon. Without that, who has one job would have less.
    -- Whether they are is checked by calls for other jobs, and by the reaper's.
    if made_room or job.id == own or not is_stuck(job) then break end
    redis.call('ZREM', jobs_of(job), job.id)
  else
    issue(job, set)
    for _, each in ipairs({job.id, job.chunk}) do answer[#answer + 1] = each end
  end
end
return answer
