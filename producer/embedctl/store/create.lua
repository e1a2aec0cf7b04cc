-- KEYS: job, active, birth, jobs, upkeep, queues, [idempotency].
-- ARGV: job id, now, time to live, time to keep the shared keys, job key without its id, time of the reaper's first look,
-- queue, time to keep the queues, then fields and values.
-- → created | exists <job id>
if KEYS[7] then
  local first = redis.call('GET', KEYS[7])
  if first and redis.call('EXISTS', ARGV[5] .. first) == 1 then return {'exists', first} end
  redis.call('SET', KEYS[7], ARGV[1], 'PX', ARGV[3])
end
redis.call('HSET', KEYS[1], unpack(ARGV, 9))
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1])
redis.call('ZADD', KEYS[4], ARGV[2], ARGV[1])
redis.call('ZADD', KEYS[5], ARGV[6], ARGV[1])
redis.call('ZADD', KEYS[6], 'GT', ARGV[2], ARGV[7])
redis.call('PEXPIRE', KEYS[6], ARGV[8])
redis.call('SET', KEYS[3], ARGV[2], 'NX')
for _, shared in ipairs({KEYS[2], KEYS[3], KEYS[4], KEYS[5]}) do
  if redis.call('PTTL', shared) < tonumber(ARGV[4]) then redis.call('PEXPIRE', shared, ARGV[4]) end
end
return {'created'}
