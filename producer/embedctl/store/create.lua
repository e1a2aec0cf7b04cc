-- KEYS: job, quota of its tenant, [idempotency].
-- ARGV: job id, now, time to live, time to keep the shared keys, job key without its id, time of the reaper's first look,
-- queue, token, then fields and values.
-- → created | exists <job id> | taken | full <limit> <its value> <what the tenant has>
-- Ids are short, so another job may have this one, or a file whose parts are named so. If the answer was lost, the client
-- asks again, and may have added to the job by then.
if redis.call('EXISTS', KEYS[1], KEYS[1] .. ':out:0') > 0 then
  return {redis.pcall('HGET', KEYS[1], 'token') == ARGV[8] and 'created' or 'taken'}
end
if KEYS[3] then
  local first = redis.call('GET', KEYS[3])
  if first and redis.call('EXISTS', ARGV[5] .. first) == 1 then return {'exists', first} end
end
local limits = quota_of(KEYS[2], ARGV[1])
local full = without_room(limits, function(_, most, used) return used < most end)
if full then return full end
if KEYS[3] then redis.call('SET', KEYS[3], ARGV[1], 'PX', ARGV[3]) end
redis.call('HSET', KEYS[1], 'token', unpack(ARGV, 8))
if limits[7] then
  redis.call('HSET', KEYS[1], 'limited', 1)
  note(KEYS[2], ARGV[1], limits, 0, 0)
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
enlist(ARGV[1], ARGV[2], ARGV[7], ARGV[6], ARGV[4])
return {'created'}
