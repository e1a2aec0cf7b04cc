-- Forget a reference to bytes that are gone from outside of Redis. The chunk then counts as lost, and its corpus repairs it.
-- How many records a counted or a retrying chunk's input had is noted, because the repair counts them.
-- KEYS[2]: input or result. ARGV: job, the reference, [chunk, if it is an input]. → ok <1 if it was still there, else 0>
if redis.call('GET', KEYS[2]) ~= ARGV[2] then return {'ok', 0} end
local chunk, rows, size = ARGV[3], rows_of(KEYS[2]), size_of(KEYS[2])
redis.call('UNLINK', KEYS[2])  -- first: in a full Redis, a script that begins by freeing may go on
store(-size)
if chunk then
  local waits = redis.call('GETBIT', counted, chunk) == 0
  local retries = original and tonumber(chunk) >= original
  if retries and waits then redis.call('HINCRBY', job, 'waiting_bytes', 0 - size) end
  if retries or not waits then
    redis.call('HSET', attempts, chunk .. ':gone', rows)
    redis.call('PEXPIRE', attempts, keep_ms)
  end
end
account()
if not ended then look_by(now) end
return {'ok', 1}
