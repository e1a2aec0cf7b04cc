-- Note a step of a batch, if its runner still has it.
-- KEYS: batch, its tenant's files, then files that the step makes.
-- ARGV: id, token, the step in JSON: the status before (or none), the one that the runner knows, the new one (or none), what
-- to do with the batch (keep, release, end), the time of the next look from now, fields and values, whether somebody is to be
-- told of the end; and the time to live, size, id, fields and values of each file.
-- → done <status> | lost | other <status>
local facts = redis.call('HMGET', KEYS[1], 'runner', 'status', 'tenant')
if facts[1] ~= ARGV[2] then return {'lost'} end
local step = cjson.decode(ARGV[3])
if step.before and step.before ~= facts[2] then return {'other', facts[2]} end
for at, each in ipairs(step.files) do
  redis.call('HSET', KEYS[2 + at], unpack(each.fields))
  redis.call('PEXPIRE', KEYS[2 + at], each.ttl_ms)
  keep_parts(KEYS[2 + at], each.ttl_ms)
  redis.call('ZADD', KEYS[2], 0, each.id)
  keep_bytes(KEYS[2], each.size)
  if redis.call('PTTL', KEYS[2]) < each.ttl_ms then redis.call('PEXPIRE', KEYS[2], each.ttl_ms) end
end
if #step.fields > 0 then redis.call('HSET', KEYS[1], unpack(step.fields)) end
if step.after == 'end' then
  finish(ARGV[1], step.status, step.told)
else
  if step.status then enter(ARGV[1], step.status) end
  local next_ms = step.next_ms
  if step.after == 'release' then
    redis.call('HDEL', KEYS[1], 'runner')
    -- Who asked for the end could not wake the runner.
    if facts[2] ~= step.known then next_ms = 0 end
  end
  look_at(ARGV[1], facts[3], now + next_ms)
end
return {'done', redis.call('HGET', KEYS[1], 'status')}
