-- Put a file, a batch or an event back into the sets that name it, by its own record.
-- KEYS: its hash, its tenant's set or that of the untold events, [the unfinished batches]. ARGV: id. → ok | gone
local left_ms = redis.call('PTTL', KEYS[1])
if left_ms < 0 then return {'gone'} end
local over = {completed = true, failed = true, expired = true, cancelled = true}
for at = 2, #KEYS do
  if at == 2 or not over[redis.call('HGET', KEYS[1], 'status')] then
    redis.call('ZADD', KEYS[at], 'NX', 0, ARGV[1])
    if redis.call('PTTL', KEYS[at]) < left_ms then redis.call('PEXPIRE', KEYS[at], left_ms) end
  end
end
return {'ok'}
