-- End a chunk, once: the first result with the right fingerprint wins, even if another worker holds the lease now.
-- KEYS[9..11]: input, result, uncommitted result. ARGV: job, chunk, model fingerprint, records with a vector, records
-- failed, records truncated, tokens, work, dim, input of the failed records or '', part of the interactive lane,
-- [length of a result that came in parts].
-- → ok | refused | mismatch <pinned> | missing
local chunk, pinned = ARGV[2], facts.model_fingerprint

-- A distrusted job is trusted again after so many chunks that came through quarantine, with no row that killed a worker.
local function trust(queue, instance, deaths)
  if not instance or not redis.call('ZSCORE', QUEUE_KEY .. queue .. ':quarantine', instance) then return end
  if deaths and cjson.decode(deaths).rows ~= '' then return end
  if redis.call('HINCRBY', job, 'trials_left', -1) > 0 then return end
  redis.call('HSET', job, 'distrusted_ms', 0, 'watched_ms', now + WATCH_MS)
  facts.distrusted_ms = nil
  list_all(place_of(facts))
end

-- After a crash, Redis may have lost the added chunk. Its producer adds it again, perhaps with another text.
local text = redis.call('GETRANGE', KEYS[9], DIGEST_FROM, DIGEST_TO)
local made_of = redis.call('GETRANGE', KEYS[11], DIGEST_FROM, DIGEST_TO)
-- If Redis lost only the result, the chunk stays counted until the corpus repairs it.
local useless = ended or tonumber(chunk) >= tonumber(facts.added) or redis.call('EXISTS', KEYS[10]) == 1
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
-- One write of all counts, because each is told to the append-only file.
local to, below = tonumber(facts.resumed_to), tonumber(facts.resumed_below)
local waited = not to or tonumber(chunk) < to or tonumber(chunk) >= below
local written = {}
for field, more in pairs({chunks_done = 1, done = ARGV[4], failed = ARGV[5], truncated = ARGV[6], tokens = ARGV[7],
  work = ARGV[8], result_bytes = size_of(KEYS[10]), waiting_bytes = waited and 0 - size_of(KEYS[9]) or 0}) do
  if more ~= '0' then
    facts[field] = (facts[field] or 0) + more
    written[#written + 1], written[#written + 2] = field, string.format('%d', facts[field])
  end
end
redis.call('HSET', job, 'dim', ARGV[9], 'model_fingerprint', ARGV[3], 'progressed_ms', now_text, unpack(written))
facts.model_fingerprint = ARGV[3]
if ARGV[10] == '' then redis.call('UNLINK', KEYS[9]) else redis.call('SET', KEYS[9], ARGV[10], 'PX', keep_ms) end
local instance, estimated = (redis.call('HGET', owners, chunk) or ''):match('^%S+ (%S+) (%S+)')
local deaths = facts.distrusted_ms and redis.call('HGET', attempts, chunk .. ':deaths')
forget(chunk)
if outside then redis.call('HDEL', attempts, chunk .. ':gone') end  -- this worker still had the text
redis.call('SETBIT', counted, chunk, 1)
if facts.chunks_done == 1 then live(counted) end
event('chunk', chunk)
-- Its tenant and its lane were charged for an estimate.
local place, more = place_of(facts), ARGV[8] - (estimated or 0)
local kinds = {[place.kind] = true, [kind_of(facts.precision, '*')] = true}
charge(place, kinds, more / weight_of(place.tenant, facts.weight))
charge_lane(place, more, ARGV[11])
end_if_hopeless()
end_if_done()
if place.is_apart and not ended then
  trust(place.queue, instance, deaths)
  place = place_of(facts)
end
renew()
account()
if place.is_ready and not place.is_apart then ring(place.queue, 1) end
return {'ok'}
