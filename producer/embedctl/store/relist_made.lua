-- Put a file, a batch or an event back into the sets that name it, by its own record.
-- KEYS: its hash, its tenant's set or that of the untold events. ARGV: id. → ok | gone
local left_ms = redis.call('PTTL', KEYS[1])
if left_ms < 0 then return {'gone'} end
if KEYS[1] == BATCH .. ARGV[1] and not ENDED[redis.call('HGET', KEYS[1], 'status')] then
  local tenant = redis.call('HGET', KEYS[1], 'tenant')
  look_at(ARGV[1], tenant, redis.call('ZSCORE', UNFINISHED .. tenant, ARGV[1]) or 0)
  note_deadline(ARGV[1])
end
redis.call('ZADD', KEYS[2], 'NX', 0, ARGV[1])
if redis.call('PTTL', KEYS[2]) < left_ms then redis.call('PEXPIRE', KEYS[2], left_ms) end
return {'ok'}
