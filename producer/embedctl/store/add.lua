-- Store the next chunk's input, or check that an earlier chunk is the same as the stored one.
-- KEYS[9..11]: producer, input, result. ARGV: job, chunk, digest, rows, input, token, lease.
-- → ok <bytes waiting> | skipped <bytes waiting> | differs | held | stopped | sealed <chunks> | gap <chunks>
local chunk, rows, input = tonumber(ARGV[2]), tonumber(ARGV[4]), ARGV[5]
if redis.call('HGET', job, 'stopped_by') then return {'stopped'} end
if not sealed and not hold(KEYS[9], ARGV[6], ARGV[7]) then return {'held'} end
local added = tonumber(redis.call('HGET', job, 'added'))
if chunk > added then return {'gap', added} end
if chunk >= (original or (sealed and added) or math.huge) then return {'sealed', original or added} end
if chunk < added then
  local was_counted = redis.call('GETBIT', counted, chunk) == 1
  local digest = redis.call('GETRANGE', KEYS[11], DIGEST_FROM, DIGEST_TO)
  if digest == '' and is_drained(chunk) then
    digest = redis.call('GETRANGE', digests, 16 * chunk, 16 * chunk + 15)
  elseif digest == '' and not was_counted then
    digest = redis.call('GETRANGE', KEYS[10], DIGEST_FROM, DIGEST_TO)
  end
  if digest == ARGV[3] and not lost_a_retry(chunk) then return {'skipped', redis.call('HGET', job, 'waiting_bytes')} end
  if digest ~= '' and digest ~= ARGV[3] then return {'differs'} end
  -- Redis lost this chunk, and the corpus repairs it.
  redis.call('HDEL', job, 'lost_first', 'lost_last')
  if was_counted then uncount(chunk, rows) else redis.call('HINCRBY', job, 'waiting_bytes', -#input) end
  if chunk < tonumber(redis.call('HGET', job, 'next')) then schedule(chunk, 0) end
else
  redis.call('HSET', job, 'added', added + 1)
  redis.call('HINCRBY', job, 'records', rows)
end
redis.call('SET', KEYS[10], input, 'PX', keep_ms)
local waiting = redis.call('HINCRBY', job, 'waiting_bytes', #input)
progress()
return {'ok', waiting}
