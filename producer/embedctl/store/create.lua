-- KEYS: job, quota of its tenant, [idempotency].
-- ARGV: job id, now, time to live, time to keep the shared keys, job key without its id, time of the reaper's first look,
-- queue, what a gateway asks for its call (see `rooms`) or '', tenant and the words `keeps` (see `sums`) or '', token, then
-- fields and values.
-- → created | exists <job id> | taken | full <limit> <its value> <what the tenant has, or of a rate: ms until there is room>
--   | no_room <full or share> <kind>
-- Ids are short, so another job may have this one, or a file whose parts are named so. If the answer was lost, the client
-- asks again, and may have added to the job by then.
if redis.call('EXISTS', KEYS[1], KEYS[1] .. ':out:0') > 0 then
  return {redis.pcall('HGET', KEYS[1], 'token') == ARGV[11] and 'created' or 'taken'}
end
if KEYS[3] then
  local first = redis.call('GET', KEYS[3])
  if first and redis.call('EXISTS', ARGV[5] .. first) == 1 then return {'exists', first} end
end
local asked = ARGV[8] ~= '' and cjson.decode(ARGV[8])
local heard = asked and hear(asked)
local limits = quota_of(KEYS[2], ARGV[1])
local keeps = ARGV[10] ~= '' and ARGV[10]
local whole = keeps and kept_of(keeps, 0, 0, 0)
local full = without_room(limits, function(_, most, used) return used < most end)
  or (asked and within_rate(KEYS[2], limits, 'max_texts_s', asked.texts, true))
  or (keeps and without_keeping(KEPT_BY .. ARGV[9], keeps, ARGV[9], whole, whole > KEPT_JOB and KEPT_PART or 1))
if full then return full end
local none = asked and without_place(asked, heard)
if none then return {'no_room', unpack(none)} end
full = within_rate(KEYS[2], limits, 'max_requests_s', 1)
if full then return full end
if asked then take_place(asked) end
if KEYS[3] then redis.call('SET', KEYS[3], ARGV[1], 'PX', UNBEGUN_TTL_MS) end
redis.call('HSET', KEYS[1], 'token', unpack(ARGV, 11))
if limits[7] then
  redis.call('HSET', KEYS[1], 'limited', 1)
  note(KEYS[2], ARGV[1], limits, 0, 0)
end
if keeps then
  local stored = redis.call('HSTRLEN', KEYS[1], 'options')
  redis.call('HSET', KEYS[1], 'keeps', keeps, 'kept_bytes', stored)
  note_kept(KEPT_BY .. ARGV[9], ARGV[1], kept_of(keeps, stored, 0, 0))
  redis.call('ZADD', QUOTAS, 'GT', ARGV[2], ARGV[9])  -- what is noted is corrected then
  redis.call('PEXPIRE', QUOTAS, QUEUES_TTL_MS)
end
redis.call('PEXPIRE', KEYS[1], UNBEGUN_TTL_MS)
enlist(ARGV[1], ARGV[2], ARGV[7], ARGV[6], ARGV[4])
return {'created'}
