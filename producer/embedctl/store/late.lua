-- Let each batch whose deadline is over go on to its end: one that waits or runs is to be ended by a runner, and one that
-- nobody could end, or whose status is none, is ended here, from its facts alone. ARGV: 1 if somebody is to be told of ends.
-- → done <job of a batch that was ended here>, …
redis.call('ZREM', DEADLINES, '')  -- in a full Redis, a script that begins by freeing may go on
local jobs = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', DEADLINES, '-inf', ledger_now(), 'LIMIT', 0, 16)) do
  local facts = redis.pcall('HMGET', BATCH .. id, 'status', 'runner', 'total', 'job', 'ends_as', 'tenant')
  local status = facts[1]
  if status == 'validating' or status == 'in_progress' then
    redis.call('HSET', BATCH .. id, 'ends_as', 'expired')
    enter(id, 'finalizing')
    if not facts[2] then look_at(id, facts[6], 0) end
  elseif status == 'finalizing' or status == 'cancelling' then
    redis.call('HSET', BATCH .. id, 'completed', 0, 'failed', facts[3] or 0, 'errors', TOO_LATE)
    finish(id, status == 'cancelling' and 'cancelled' or facts[5] or 'expired', ARGV[1] == '1')
    if facts[4] and facts[4] ~= '' then jobs[#jobs + 1] = facts[4] end
  elseif status and not ENDED[status] then  -- somebody has damaged it
    redis.call('HSET', BATCH .. id, 'total', 0, 'completed', 0, 'failed', 0, 'errors', TOO_LATE)
    finish(id, 'failed', ARGV[1] == '1')
  else
    redis.call('ZREM', DEADLINES, id)
  end
end
return {'done', unpack(jobs)}
