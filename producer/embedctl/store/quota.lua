-- State the limits of a tenant. If workers state different ones, the worker that was started last decides while it lives.
-- KEYS: quota, quotas. ARGV: tenant, when this worker was started, its name, most jobs, records and bytes (0: no limit),
-- time to keep them, time after which a silent worker no longer decides.
-- → ok | other <name> <most jobs> <most records> <most bytes>
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local known = redis.call('HMGET', KEYS[1], 'since', 'stated', 'by', 'max_jobs', 'max_waiting_records',
  'max_waiting_bytes')
if not known[1] and ARGV[4] == '0' and ARGV[5] == '0' and ARGV[6] == '0' then return {'ok'} end
local same = known[4] == ARGV[4] and known[5] == ARGV[5] and known[6] == ARGV[6]
local decides = not known[1] or tonumber(ARGV[2]) >= tonumber(known[1])
  or now - tonumber(known[2]) > tonumber(ARGV[8])
if not same and not decides then return {'other', known[3], known[4], known[5], known[6]} end
if decides then
  redis.call('HSET', KEYS[1], 'since', ARGV[2], 'by', ARGV[3], 'max_jobs', ARGV[4], 'max_waiting_records', ARGV[5],
    'max_waiting_bytes', ARGV[6])
end
redis.call('HSET', KEYS[1], 'stated', now)
redis.call('PEXPIRE', KEYS[1], ARGV[7])
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[7])
local lapsed = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now - ARGV[7], 'LIMIT', 0, 10)
if #lapsed > 0 then redis.call('ZREM', KEYS[2], unpack(lapsed)) end
return {'ok'}
