-- Shared by `create` and `relist`: the lists of all jobs.

-- List a job that was made then. If it still needs the reaper, that looks at it by this time. The lists live so long.
local function enlist(id, made_ms, queue, look_ms, keep_ms)
  redis.call('ZADD', JOBS, 'NX', made_ms, id)
  redis.call('ZADD', QUEUES, 'GT', made_ms, queue)
  redis.call('PEXPIRE', QUEUES, QUEUES_TTL_MS)
  if look_ms then
    redis.call('ZADD', ACTIVE, 'NX', made_ms, id)
    redis.call('ZADD', UPKEEP, 'LT', look_ms, id)
  end
  local birth = tonumber(redis.call('GET', BIRTH))
  if not birth or birth > tonumber(made_ms) then redis.call('SET', BIRTH, made_ms) end
  for _, shared in ipairs({ACTIVE, BIRTH, JOBS, UPKEEP}) do
    if redis.call('PTTL', shared) < tonumber(keep_ms) then redis.call('PEXPIRE', shared, keep_ms) end
  end
end
