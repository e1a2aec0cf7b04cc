-- Shorten the lives of a slice of an ended job's chunks to what its TTL leaves, and after the last one the job's own: until
-- then a job lives as long as one that has not ended, so that no chunk outlives it.
-- ARGV: job, first chunk, slice, input key without its chunk, result key and retry pointer likewise.
-- → ok <next chunk, or 0 at the end> | open
if not ended then return {'open'} end
local facts = redis.call('HMGET', job, 'ended_ms', 'added', 'stopped_by', 'idempotency_key')
local left_ms = math.max(1, facts[1] + ttl_ms - now)
local from, added = tonumber(ARGV[2]), tonumber(facts[2])
local to = math.min(from + ARGV[3], added)
for chunk = from, to - 1 do
  if facts[3] then redis.call('UNLINK', ARGV[4] .. chunk) end  -- nobody will encode it
  for at = 4, 6 do redis.call('PEXPIRE', ARGV[at] .. chunk, left_ms + math.floor(ttl_ms * (CHUNK_TTL_FACTOR - 1))) end
end
if to < added then return {'ok', to} end
for _, key in ipairs({job, counted}) do redis.call('PEXPIRE', key, left_ms) end
redis.call('PEXPIRE', events, math.min(left_ms, ENDED_EVENTS_MS))
if facts[4] and redis.call('GET', facts[4]) == ARGV[1] then redis.call('PEXPIRE', facts[4], left_ms) end
redis.call('ZREM', active, ARGV[1])
redis.call('ZREM', upkeep, ARGV[1])
return {'ok', 0}
