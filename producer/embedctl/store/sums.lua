-- Shared by the scripts about a tenant's limits, and by the prelude: what is noted of a tenant's jobs in its quota.

-- The limits of a tenant, the sums of what is noted, and what is noted of a job.
local function quota_of(quota, id)
  return redis.call('HMGET', quota, 'max_jobs', 'max_waiting_records', 'max_waiting_bytes', 'jobs', 'records', 'bytes',
    'since', 'job:' .. id, 'max_requests_s', 'max_texts_s', 'left:max_requests_s', 'left:max_texts_s')
end

-- Note how many records and bytes of a job wait; nil if it has ended or is gone. What was noted of it before leaves the
-- sums, so the same note twice changes nothing. Without limits, nothing is noted.
local function note(quota, id, known, records, bytes)
  if not known[7] then return end
  local field, had, before_records, before_bytes = 'job:' .. id, 0, 0, 0
  if known[8] then
    had = 1
    before_records, before_bytes = known[8]:match('^(%d+) (%d+)$')
  elseif not records then
    return
  end
  local function sum(at, less, more)
    return string.format('%.0f', math.max(0, (tonumber(known[at]) or 0) - (tonumber(less) or 0) + more))
  end
  local sums = {'jobs', sum(4, had, records and 1 or 0), 'records', sum(5, before_records, records or 0),
    'bytes', sum(6, before_bytes, bytes or 0)}
  if records then
    redis.call('HSET', quota, field, string.format('%.0f %.0f', records, bytes), unpack(sums))
  else
    redis.call('HDEL', quota, field)  -- first: in a full Redis, a script that begins by freeing may go on
    redis.call('HSET', quota, unpack(sums))
  end
end

-- Note how many bytes count as kept of a gateway's job, 0 if it is gone. What was noted of it before leaves the sum.
local function note_kept(kept, id, bytes)
  local had, sum = unpack(redis.call('HMGET', kept, id, 'sum'))
  local more = bytes - (had or 0)
  if more == 0 then return end
  if bytes == 0 then redis.call('HDEL', kept, id) end  -- first: in a full Redis, a script that begins by freeing may go on
  redis.call('HSET', kept, 'sum', string.format('%.0f', math.max(0, (sum or 0) + more)))
  if bytes > 0 then redis.call('HSET', kept, id, string.format('%.0f', bytes)) end
  if not sum then redis.call('PEXPIRE', kept, QUEUES_TTL_MS) end
end

-- How many bytes count as kept of a gateway's job: what Redis keeps of it, and what is expected of the records, and of the
-- bytes of text, that wait. `keeps` are the words `most row byte factor [whole beside]`: the most that its tenant keeps; the
-- bytes of results that a record gives, and a byte of text; by how much what is stored is multiplied; what the whole job will
-- count at least, as far as that is known; and the bytes of files that are kept as long as it is. Until the job has all its
-- records (`is_whole`), it counts as so much: of two jobs that have begun, neither waits for what the other one has.
local function kept_of(keeps, stored, records, bytes, is_whole)
  local row, byte, factor, whole = keeps:match('^%S+ (%S+) (%S+) (%S+) ?(%S*)')
  local counted = math.ceil(KEPT_JOB + (stored or 0) * factor + records * row + bytes * byte)
  return is_whole and counted or math.max(counted, tonumber(whole) or 0)
end

-- The answer if a tenant that keeps so many bytes more would have more than this part of what it may keep, its files
-- included; nil if it would not.
local function without_keeping(kept, keeps, tenant, more, part)
  if more <= 0 then return nil end
  local most = tonumber(keeps:match('^%S+'))
  local used = (redis.call('HGET', kept, 'sum') or 0) + (redis.call('HGET', LEDGER .. 'kept', FILES .. tenant) or 0)
  if used + more > most * part then return {'full', 'max_kept_bytes', most, used, tenant} end
end

-- How many records and bytes of a job wait. Its text from before it was stopped does not, until it is added again.
local function waiting_of(records, done, failed, bytes, resumed)
  local left = (tonumber(records) or 0) - (tonumber(done) or 0) - (tonumber(failed) or 0) - (tonumber(resumed) or 0)
  return math.max(0, left), math.max(0, tonumber(bytes) or 0)
end

-- The first limit that leaves no room: its name, its value, and what the tenant has; nil if there is room.
local function without_room(known, has_room)
  for at, name in ipairs({'max_jobs', 'max_waiting_records', 'max_waiting_bytes'}) do
    local most, used = tonumber(known[at]) or 0, tonumber(known[at + 3]) or 0
    if most > 0 and not has_room(name, most, used) then return {'full', name, most, used} end
  end
end

-- The first limit that leaves no room for more text of a job; nil if there is room. A job that is not counted, because its
-- producer was gone, needs its place among the jobs again. One that has begun leaves a tenth to new jobs. What is larger
-- than a limit is added when nothing else waits.
local function without_room_for(known, rows, bytes, has_begun)
  local waits = (tonumber(known[6]) or 0) > 0
  local more = {max_jobs = not known[8] and 1, max_waiting_records = waits and rows, max_waiting_bytes = waits and bytes}
  return without_room(known, function(name, most, used)
    return not more[name] or used + more[name] <= (has_begun and name ~= 'max_jobs' and most * 0.9 or most)
  end)
end

-- Take so much of what a tenant may begin in a second, from what is left of it: at most as much as comes in one second.
-- More than that is taken at once if nothing of it is missing, and is owed then. So a clock that is set forward gives no
-- more than one second's, and one that is set back stops nobody.
-- → full <limit> <its value> <ms until there is so much>; nil if it was taken, or is only asked for
local function within_rate(quota, known, name, amount, only_asked)
  local at = name == 'max_requests_s' and 9 or 10
  local most = tonumber(known[at]) or 0
  if most == 0 then return nil end
  local time = redis.call('TIME')
  local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
  local had, had_ms = string.match(known[at + 2] or '', '^(%S+) (%d+)$')
  had, had_ms = tonumber(had) or most, tonumber(had_ms) or now_ms
  local left = math.min(most, had + math.max(0, now_ms - had_ms) * most / 1000)
  local lacking = math.min(amount, most) - left
  local taken = (lacking > 0 or only_asked) and 0 or amount
  if taken > 0 or had_ms > now_ms then
    redis.call('HSET', quota, 'left:' .. name, string.format('%.6f %.0f', left - taken, now_ms))
  end
  if lacking > 0 then return {'full', name, most, math.ceil(lacking * 1000 / most)} end
end
