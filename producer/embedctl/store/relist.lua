-- Put a job back into the lists of all jobs, by its own record. What is there already stays.
-- KEYS: job. ARGV: job id. → ok | gone
local facts = redis.call('HMGET', KEYS[1], 'state', 'created_ms', 'hardware', 'model', 'ttl_ms', 'stopped_by',
  'idempotency_key')
local state, made_ms, ttl_ms, stopped_by, idempotency = facts[1], facts[2], tonumber(facts[5]), facts[6], facts[7]
if not state then return {'gone'} end
local time = redis.call('TIME')
local life_ms, look_ms = math.max(ttl_ms, UNENDED_TTL_MS), time[1] * 1000 + math.floor(time[2] / 1000)
local ended = state == 'completed' or state == 'completed_with_errors' or state == 'failed'
-- If its lifetime is no longer than its TTL, the reaper has nothing left to shorten; of a stopped job, it frees text.
if ended and not stopped_by and (life_ms == ttl_ms or redis.call('PTTL', KEYS[1]) <= ttl_ms) then look_ms = nil end
enlist(ARGV[1], made_ms, QUEUE_PREFIX .. facts[3] .. '.' .. facts[4], look_ms, math.floor(life_ms * CHUNK_TTL_FACTOR))
-- The key of a job that its people or its error budget gave up is free for another job.
if idempotency and state ~= 'cancelled' and stopped_by ~= 'max_errors' then
  redis.call('SET', idempotency, ARGV[1], 'NX', 'PX', redis.call('PTTL', KEYS[1]))
end
return {'ok'}
