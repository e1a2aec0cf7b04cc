-- End a chunk, once: the first result with the right fingerprint wins, even if another worker holds the lease now.
-- KEYS[2..4]: input, result, uncommitted result. ARGV: job, chunk, model fingerprint, records with a vector, records
-- failed, records truncated, tokens, work, dim, input of the failed records or '', part of the interactive lane,
-- [length of a result that came in parts].
-- → ok | refused | mismatch <pinned> | missing
local chunk, pinned = ARGV[2], facts.model_fingerprint

-- A distrusted job or tenant is trusted again after so many chunks that came through quarantine, with no row that killed a
-- worker.
local function trust(queue, instance, deaths)
  if not instance or not redis.call('ZSCORE', QUEUE_KEY .. queue .. ':quarantine', instance) then return end
  if deaths and cjson.decode(deaths).rows ~= '' then return end
  for _, whose in ipairs(ended and {faults()} or {faults(), job}) do
    if is_still(whose, 'distrusted_ms') and redis.call('HINCRBY', whose, 'trials_left', -1) <= 0 then
      redis.call('HSET', whose, 'distrusted_ms', 0, 'watched_ms', now + WATCH_MS)
      if not ended then list_all(place_of(facts)) end
    end
  end
end

-- After a crash, Redis may have lost the added chunk. Its producer adds it again, perhaps with another text.
local text = redis.call('GETRANGE', KEYS[2], DIGEST_FROM, DIGEST_TO)
local made_of = redis.call('GETRANGE', KEYS[4], DIGEST_FROM, DIGEST_TO)
-- If Redis lost only the result, the chunk stays counted until the corpus repairs it.
local useless = ended or tonumber(chunk) >= tonumber(facts.added) or (text ~= made_of and text ~= '' and made_of ~= '')
  or redis.call('GETBIT', counted, chunk) == 1
local queue = QUEUE_PREFIX .. facts.hardware .. '.' .. facts.model
local has_more = tonumber(facts.next) < tonumber(facts.added)
-- Its tenant and its lane were charged for an estimate. The job's next claim sets that right if it is little, and if there
-- is one: who was charged too much would wait for it. What quarantine took is not charged.
local instance, estimated, claims = (redis.call('HGET', owners, chunk) or ''):match('^%S+ (%S+) (%d+) (%d+)')
local owed = (facts.owed or 0) + (estimated == '0' and 0 or ARGV[8] - (estimated or 0))
local is_owed_now = owed ~= 0 and (not has_more or math.abs(owed) > ARGV[8] / OWED)
local is_other = pinned and pinned ~= ARGV[3]
if not useless and not is_other then
  if made_of == '' or (ARGV[12] and redis.call('STRLEN', KEYS[4]) < tonumber(ARGV[12])) then return {'missing'} end
  useless = redis.call('RENAMENX', KEYS[4], KEYS[3]) == 0
  if useless then redis.call('HDEL', owners, chunk) end  -- it is not counted, but nobody need encode it
end
if useless or is_other then
  redis.call('UNLINK', KEYS[4])
  redis.call('HINCRBY', job, 'refused', 1)
  if not useless then return {'mismatch', pinned} end
  return {'refused'}
end
redis.call('PEXPIRE', KEYS[3], keep_ms)
-- One write of all counts, because each is told to the append-only file.
local to = tonumber(facts.resumed_to)
local waited = not to or tonumber(chunk) < to or tonumber(chunk) >= tonumber(redis.call('HGET', job, 'resumed_below'))
local written = {}
local function add(field, had, more)
  local sum = (had or 0) + more
  if more ~= '0' then written[#written + 1], written[#written + 2] = field, string.format('%d', sum) end
  return sum
end
facts.chunks_done, facts.done = add('chunks_done', facts.chunks_done, 1), add('done', facts.done, ARGV[4])
facts.failed, facts.result_bytes = add('failed', facts.failed, ARGV[5]), add('result_bytes', facts.result_bytes, size_of(KEYS[3]))
add('truncated', facts.truncated, ARGV[6])
add('tokens', facts.tokens, ARGV[7])
add('work', facts.work, ARGV[8])
if waited then add('waiting_bytes', facts.waiting_bytes, 0 - size_of(KEYS[2])) end
if kept then
  local failed = ARGV[10] == '' and 0 or size_in(ARGV[10])
  add('kept_bytes', facts.kept_bytes, size_of(KEYS[3]) - size_of(KEYS[2]) + failed)
end
if owed ~= 0 or facts.owed then
  written[#written + 1], written[#written + 2] = 'owed', string.format('%d', is_owed_now and 0 or owed)
end
if not pinned or facts.chunks_done == 1 then
  redis.call('HSET', job, 'dim', ARGV[9], 'model_fingerprint', ARGV[3])
end
redis.call('HSET', job, 'progressed_ms', now_text, unpack(written))
local listed = not instance and place_of(facts)
facts.model_fingerprint = ARGV[3]
if ARGV[10] == '' then redis.call('UNLINK', KEYS[2]) else redis.call('SET', KEYS[2], ARGV[10], 'PX', keep_ms) end
local deaths = facts.distrusted_ms and redis.call('HGET', attempts, chunk .. ':deaths')
forget(chunk, claims)
if outside then redis.call('HDEL', attempts, chunk .. ':gone') end  -- this worker still had the text
redis.call('SETBIT', counted, chunk, 1)
if facts.chunks_done == 1 then redis.call('PEXPIRE', counted, keep_ms) end
event('chunk', chunk)
-- By the record, nobody had this chunk, and the job is listed for it, perhaps for workers with any files. If Redis has lost
-- what leads to that list, nobody comes by to see that it is over.
if listed then
  leave(listed, ARGV[1])
  leave(apart(listed), ARGV[1])
  list_all(place_of(read()))
end
local function charge_now()
  local place = place_of(facts)
  local kinds = {[place.kind] = true, [kind_of(facts.precision, '*')] = true}
  charge(place, kinds, owed / weight_of(place.tenant, facts.weight))
  charge_lane(place, owed, ARGV[11])
end
if is_owed_now then charge_now() end
end_if_due()
if facts.distrusted_ms then trust(queue, instance, deaths) end
renew()
account()
if has_more and not ended and redis.pcall('LLEN', queue) == 0 then ring(queue, 1) end
return {'ok'}
