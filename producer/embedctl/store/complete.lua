-- End a chunk, once: the first result with the right fingerprint wins, even if another worker holds the lease now.
-- KEYS[9..11]: input, result, uncommitted result. ARGV: job, chunk, model fingerprint, records with a vector, records
-- failed, records truncated, tokens, work, dim, input of the failed records or '', part of the interactive lane,
-- [length of a result that came in parts].
-- → ok | refused | mismatch <pinned> | missing
local chunk = ARGV[2]
local facts = redis.call('HMGET', job, 'model_fingerprint', 'added', 'resumed_to', 'resumed_below')
local pinned, added = facts[1], tonumber(facts[2])
-- After a crash, Redis may have lost the added chunk. Its producer adds it again, perhaps with another text.
local text = redis.call('GETRANGE', KEYS[9], DIGEST_FROM, DIGEST_TO)
local made_of = redis.call('GETRANGE', KEYS[11], DIGEST_FROM, DIGEST_TO)
-- If Redis lost only the result, the chunk stays counted until the corpus repairs it.
local useless = ended or tonumber(chunk) >= added or redis.call('EXISTS', KEYS[10]) == 1
  or redis.call('GETBIT', counted, chunk) == 1 or (text ~= made_of and text ~= '' and made_of ~= '')
if useless or (pinned and pinned ~= ARGV[3]) then
  redis.call('UNLINK', KEYS[11])
  redis.call('HINCRBY', job, 'refused', 1)
  if not useless then return {'mismatch', pinned} end
  return {'refused'}
end
if made_of == '' or (ARGV[12] and redis.call('STRLEN', KEYS[11]) < tonumber(ARGV[12])) then return {'missing'} end
redis.call('RENAMENX', KEYS[11], KEYS[10])
redis.call('PEXPIRE', KEYS[10], keep_ms)
if not facts[3] or tonumber(chunk) < tonumber(facts[3]) or tonumber(chunk) >= tonumber(facts[4]) then
  redis.call('HINCRBY', job, 'waiting_bytes', 0 - size_of(KEYS[9]))
end
if ARGV[10] == '' then redis.call('UNLINK', KEYS[9]) else redis.call('SET', KEYS[9], ARGV[10], 'PX', keep_ms) end
local estimated = (redis.call('HGET', owners, chunk) or ''):match('^%S+ %S+ (%S+)') or 0
forget(chunk)
if outside then redis.call('HDEL', attempts, chunk .. ':gone') end  -- this worker still had the text
redis.call('SETBIT', counted, chunk, 1)
redis.call('HINCRBY', job, 'chunks_done', 1)
redis.call('HINCRBY', job, 'done', ARGV[4])
if ARGV[5] ~= '0' then redis.call('HINCRBY', job, 'failed', ARGV[5]) end
if ARGV[6] ~= '0' then redis.call('HINCRBY', job, 'truncated', ARGV[6]) end
redis.call('HINCRBY', job, 'result_bytes', size_of(KEYS[10]))
redis.call('HINCRBY', job, 'tokens', ARGV[7])
redis.call('HINCRBY', job, 'work', ARGV[8])
redis.call('HSET', job, 'dim', ARGV[9], 'model_fingerprint', ARGV[3])
event('chunk', chunk)
local place = place_of_job()
-- Its tenant and its lane were charged for an estimate.
charge(place, {place.kind, place.kind:match('^[^:]+:') .. '*'}, (ARGV[8] - estimated) / weight_of(place.tenant, redis.call('HGET', job, 'weight')))
charge_lane(place, ARGV[8] - estimated, ARGV[11])
end_if_hopeless()
end_if_done()
progress()
account()
if place.is_ready and not place.is_apart then ring(place.queue, 1, now) end
return {'ok'}
