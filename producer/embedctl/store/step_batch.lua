-- Note a step of a batch, if its runner still has it.
-- KEYS: batch, unfinished, its tenant's files, the untold events, the event of its end, then files that the step makes.
-- ARGV: id, token, the step in JSON: the status before (or none), what to do with the batch (keep, release, end), the
-- time of the next look from now, fields and values, the batch's time to live, the time to live, id, fields and values
-- of each file, and, if somebody is to be told of the end, those of the event.
-- → done <status> | lost | other <status>
local facts = redis.call('HMGET', KEYS[1], 'runner', 'status')
if facts[1] ~= ARGV[2] then return {'lost'} end
local step = cjson.decode(ARGV[3])
if step.before and step.before ~= facts[2] then return {'other', facts[2]} end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for at, each in ipairs(step.files) do
  redis.call('HSET', KEYS[5 + at], unpack(each.fields))
  redis.call('PEXPIRE', KEYS[5 + at], each.ttl_ms)
  redis.call('ZADD', KEYS[3], 0, each.id)
  if redis.call('PTTL', KEYS[3]) < each.ttl_ms then redis.call('PEXPIRE', KEYS[3], each.ttl_ms) end
end
if #step.fields > 0 then redis.call('HSET', KEYS[1], unpack(step.fields)) end
if step.after == 'end' then
  redis.call('HDEL', KEYS[1], 'runner')
  redis.call('PEXPIRE', KEYS[1], step.ttl_ms)
  redis.call('ZREM', KEYS[2], ARGV[1])
  if step.event then
    redis.call('HSET', KEYS[5], unpack(step.event.fields))
    redis.call('PEXPIRE', KEYS[5], step.event.ttl_ms)
    redis.call('ZADD', KEYS[4], 0, step.event.id)
    redis.call('PEXPIRE', KEYS[4], step.event.ttl_ms)
  end
else
  local next_ms = step.next_ms
  if step.after == 'release' then
    redis.call('HDEL', KEYS[1], 'runner')
    -- Who asked for the end could not wake the runner.
    if facts[2] == 'cancelling' and step.woken then next_ms = 0 end
  end
  redis.call('ZADD', KEYS[2], now + next_ms, ARGV[1])
end
return {'done', redis.call('HGET', KEYS[1], 'status')}
