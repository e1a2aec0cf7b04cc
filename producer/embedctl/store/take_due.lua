-- Take an event that somebody is to tell. KEYS: event, the untold events. ARGV: id, token, length of the lease.
-- → taken | later | gone
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local due = redis.call('ZSCORE', KEYS[2], ARGV[1])
if not due or tonumber(due) > now then return {'later'} end
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('ZREM', KEYS[2], ARGV[1])
  return {'gone'}
end
redis.call('HSET', KEYS[1], 'runner', ARGV[2])
redis.call('ZADD', KEYS[2], now + ARGV[3], ARGV[1])
return {'taken'}
