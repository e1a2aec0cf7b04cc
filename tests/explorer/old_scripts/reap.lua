-- Choose issued chunks that need another ticket: their lease lapsed, or nobody took the last one. An owner that died makes
-- its chunk suspect; one that died at a row which it had come to with care names that row.
-- KEYS[9]: live workers of the queue. ARGV: job, first reissue after, longest reissue, most chunks, patience, careful
-- deaths without a row until the chunk is stuck. → ok <chunk>… | idle
if ended then return {'ok'} end
if redis.call('ZCOUNT', KEYS[9], now, '+inf') == 0 then return {'idle'} end
local first, longest = tonumber(ARGV[2]), tonumber(ARGV[3])
local again = {'ok'}
local overdue = redis.call('ZRANGEBYSCORE', due, '-inf', now, 'WITHSCORES', 'LIMIT', 0, ARGV[4])
for at = 1, #overdue, 2 do
  local chunk, wait, send = overdue[at], first, true
  local owner = redis.call('HGET', owners, chunk)
  local instance, row = (owner or ''):match('^%S+ (%S+) ?(%S*)$')
  local became = owner and fate(instance)
  if not owner then
    wait = math.min(first * 2 ^ redis.call('HINCRBY', reissues, chunk, 1), longest)
    redis.call('PEXPIRE', reissues, keep_ms)
  elseif row ~= '' and became ~= 'dead' and now - overdue[at + 1] < tonumber(ARGV[5]) then
    wait, send = nil, false  -- silence alone is no reason to blame a record before its time
  else
    redis.call('HDEL', owners, chunk)
    redis.call('HINCRBY', job, 'lapsed', 1)
    local unnamed = became == 'alive' and 0 or suspect(chunk, instance, row)
    local beyond = unnamed - tonumber(ARGV[6])
    if beyond >= 0 then wait, send = math.min(first * 2 ^ beyond, longest), false end
  end
  if wait then schedule(chunk, wait) end
  if send then again[#again + 1] = chunk end
end
return again
