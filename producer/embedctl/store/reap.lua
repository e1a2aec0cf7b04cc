-- Choose issued chunks that need another ticket: their lease lapsed, or nobody took the last one.
-- KEYS[9]: live workers of the queue. ARGV: job, first reissue after, longest reissue, most chunks. → ok <chunk>… | idle
if ended then return {'ok'} end
if redis.call('ZCOUNT', KEYS[9], now, '+inf') == 0 then return {'idle'} end
local lapsed = {'ok'}
for _, chunk in ipairs(redis.call('ZRANGEBYSCORE', due, '-inf', now, 'LIMIT', 0, ARGV[4])) do
  local wait = tonumber(ARGV[2])
  if redis.call('HDEL', owners, chunk) == 1 then
    redis.call('HINCRBY', job, 'lapsed', 1)
  else
    local again = redis.call('HINCRBY', reissues, chunk, 1)
    wait = math.min(wait * 2 ^ again, tonumber(ARGV[3]))
    redis.call('PEXPIRE', reissues, keep_ms)
  end
  schedule(chunk, wait)
  lapsed[#lapsed + 1] = chunk
end
return lapsed
