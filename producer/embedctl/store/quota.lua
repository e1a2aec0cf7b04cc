-- State the limits of a tenant. If workers state different ones, the worker that was started last decides while it lives.
-- KEYS: quota, quotas. ARGV: tenant, when this worker was started, its name, time to keep the limits, time after which a
-- silent worker no longer decides, weight, most jobs, records and bytes, and in a second requests and texts (0: no limit).
-- → ok | other <name> <weight> <most jobs> <most records> <most bytes> <most requests> <most texts>
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local fields = {'weight', 'max_jobs', 'max_waiting_records', 'max_waiting_bytes', 'max_requests_s', 'max_texts_s'}
local known = redis.call('HMGET', KEYS[1], 'since', 'stated', 'by', unpack(fields))
local plain, same = not known[1], true
for at = 1, #fields do
  plain = plain and ARGV[5 + at] == (at == 1 and '1.0' or '0')
  same = same and (known[3 + at] or '0') == ARGV[5 + at]
end
if plain then return {'ok'} end
local decides = not known[1] or tonumber(ARGV[2]) >= tonumber(known[1])
  or now - tonumber(known[2]) > tonumber(ARGV[5])
if not same and not decides then return {'other', unpack(known, 3, 3 + #fields)} end
if decides then
  redis.call('HSET', KEYS[1], 'since', ARGV[2], 'by', ARGV[3])
  for at, field in ipairs(fields) do redis.call('HSET', KEYS[1], field, ARGV[5 + at]) end
end
redis.call('HSET', KEYS[1], 'stated', now)
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
local lapsed = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now - ARGV[4], 'LIMIT', 0, 10)
if #lapsed > 0 then redis.call('ZREM', KEYS[2], unpack(lapsed)) end
return {'ok'}
