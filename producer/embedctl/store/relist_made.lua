-- Put a file, a batch or an event back into the sets that name it, by its own record.
-- KEYS: its hash, its tenant's set or that of the untold events. ARGV: id. → ok | gone
local left_ms = redis.call('PTTL', KEYS[1])
if left_ms < 0 then return {'gone'} end
local sets, over = {KEYS[2]}, {completed = true, failed = true, expired = true, cancelled = true}
if KEYS[1] == BATCH .. ARGV[1] and not over[redis.call('HGET', KEYS[1], 'status')] then
  sets[2] = UNFINISHED
  note_deadline(ARGV[1])
end
for _, set in ipairs(sets) do
  redis.call('ZADD', set, 'NX', 0, ARGV[1])
  if redis.call('PTTL', set) < left_ms then redis.call('PEXPIRE', set, left_ms) end
end
return {'ok'}
