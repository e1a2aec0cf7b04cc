-- Make a file or a batch, once for all tries of a request.
-- KEYS: its hash, its tenant's set, what the request has made, [the unfinished batches].
-- ARGV: id, time to live, hashes' keys without ids, 1 if this is a further try of the request else 0, time for which
-- tries are recognised, then fields and values.
-- → made <id> | exists <id>
-- If the answer was lost, the client asks again.
if redis.call('EXISTS', KEYS[1]) == 1 then return {'made', ARGV[1]} end
local before = redis.call('GET', KEYS[3])
local first, again = string.match(before or '', '^(%S+) (%d)$')
-- The first try may come after a further one.
if first and (ARGV[4] == '1' or again == '1') and redis.call('EXISTS', ARGV[3] .. first) == 1 then
  return {'exists', first}
end
redis.call('SET', KEYS[3], ARGV[1] .. ' ' .. ARGV[4], 'PX', ARGV[5])
redis.call('HSET', KEYS[1], unpack(ARGV, 6))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('ZADD', KEYS[2], 0, ARGV[1])
if KEYS[4] then redis.call('ZADD', KEYS[4], 0, ARGV[1]) end
for at = 2, 4, 2 do
  if KEYS[at] and redis.call('PTTL', KEYS[at]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[at], ARGV[2]) end
end
return {'made', ARGV[1]}
