-- State the limits of a tenant. If workers state different ones, the worker that was started last decides while it lives.
-- KEYS: quota, quotas. ARGV: tenant, when this worker was started, its name, weight, most jobs, records and bytes (0: no
-- limit), time to keep them, time after which a silent worker no longer decides.
-- → ok | other <name> <weight> <most jobs> <most records> <most bytes>
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local fields = {'weight', 'max_jobs', 'max_waiting_records', 'max_waiting_bytes'}
local known = redis.call('HMGET', KEYS[1], 'since', 'stated', 'by', unpack(fields))
local plain, same = not known[1], true
for at = 1, 4 do
  plain = plain and ARGV[3 + at] == (at == 1 and '1.0' or '0')
  same = same and known[3 + at] == ARGV[3 + at]
end
if plain then return {'ok'} end
local decides = not known[1] or tonumber(ARGV[2]) >= tonumber(known[1])
  or now - tonumber(known[2]) > tonumber(ARGV[9])
if not same and not decides then return {'other', unpack(known, 3, 7)} end
if decides then
  redis.call('HSET', KEYS[1], 'since', ARGV[2], 'by', ARGV[3])
  for at, field in ipairs(fields) do redis.call('HSET', KEYS[1], field, ARGV[3 + at]) end
end
redis.call('HSET', KEYS[1], 'stated', now)
redis.call('PEXPIRE', KEYS[1], ARGV[8])
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[8])
local lapsed = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now - ARGV[8], 'LIMIT', 0, 10)
if #lapsed > 0 then redis.call('ZREM', KEYS[2], unpack(lapsed)) end
return {'ok'}
