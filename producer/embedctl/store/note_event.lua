-- Note a try to tell an event, if its teller still has it.
-- KEYS: event, the untold events. ARGV: id, token, milliseconds until the next try, or -1 if there is none.
-- → done | lost
if redis.call('HGET', KEYS[1], 'runner') ~= ARGV[2] then return {'lost'} end
if tonumber(ARGV[3]) < 0 then
  redis.call('UNLINK', KEYS[1])
  redis.call('ZREM', KEYS[2], ARGV[1])
else
  local time = redis.call('TIME')
  redis.call('HDEL', KEYS[1], 'runner')
  redis.call('HINCRBY', KEYS[1], 'tries', 1)
  redis.call('ZADD', KEYS[2], time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[3], ARGV[1])
end
return {'done'}
