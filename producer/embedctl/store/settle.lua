-- Shorten the lifetimes of a slice of an ended job's chunks to the rest of its TTL, and after the last slice the job's own.
-- Until then the job lives as long as one that has not ended, so that no chunk outlives it. A full Redis lets this script
-- go on, because it begins by freeing. ARGV: job, slice. → ok <1 if there is more to do, else 0> | open
if not ended then return {'open'} end
local facts = redis.call('HMGET', job, 'ended_ms', 'added', 'stopped_by')
local left_ms = math.max(1, facts[1] + ttl_ms - now)
local from = tonumber(redis.call('HGET', job .. ':cursors', 'settled_to') or 0)
local added, freed = tonumber(facts[2]), 0
local to = math.min(from + ARGV[2], added)
redis.call('UNLINK', owners, ready, suspects)
if facts[3] then
  for chunk = from, to - 1 do
    -- It will not be encoded. The failed records of a job that may be resumed stay.
    if facts[3] ~= 'stop' or redis.call('GETBIT', counted, chunk) == 0 then
      freed = freed + size_of(job .. ':in:' .. chunk)
      redis.call('UNLINK', job .. ':in:' .. chunk)
    end
  end
end
store(-freed)
account()
settle(from, to, left_ms)
if to < added then
  redis.call('HSET', job .. ':cursors', 'settled_to', to)
  redis.call('PEXPIRE', job .. ':cursors', life_ms)
  return {'ok', 1}
end
redis.call('UNLINK', job .. ':cursors')
for _, key in ipairs({job, counted, drained, parts, digests}) do redis.call('PEXPIRE', key, left_ms) end
redis.call('PEXPIRE', events, math.min(left_ms, ENDED_EVENTS_MS))
local idempotency = redis.call('HGET', job, 'idempotency_key')
if idempotency and redis.call('GET', idempotency) == ARGV[1] then redis.call('PEXPIRE', idempotency, left_ms) end
redis.call('ZREM', ACTIVE, ARGV[1])
redis.call('ZREM', UPKEEP, ARGV[1])
return {'ok', 0}
