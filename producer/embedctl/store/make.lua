-- Make a file or a batch, once for all tries of a request.
-- KEYS: its hash, its tenant's set, what the request has made.
-- ARGV: id, time to live, 1 if this is a further try of the request else 0, time for which tries are recognised, the digest
-- of the request, then fields and values.
-- → made <id> | exists <id> | other
-- If the answer was lost, the client asks again.
if redis.call('EXISTS', KEYS[1]) == 1 then return {'made', ARGV[1]} end
local first, again, digest = string.match(redis.call('GET', KEYS[3]) or '', '^(%S+) (%d) (%S+)$')
if first and digest ~= ARGV[5] then return {'other'} end
-- The first try may come after a further one.
local kind = KEYS[1]:sub(1, -#ARGV[1] - 1)
if first and (ARGV[3] == '1' or again == '1') and redis.call('EXISTS', kind .. first) == 1 then return {'exists', first} end
redis.call('SET', KEYS[3], ARGV[1] .. ' ' .. ARGV[3] .. ' ' .. ARGV[5], 'PX', ARGV[4])
redis.call('HSET', KEYS[1], unpack(ARGV, 6))
redis.call('ZADD', KEYS[2], 0, ARGV[1])
local shared = {KEYS[2]}
if kind == BATCH then
  redis.call('HSET', KEYS[1], 'created_at', now_s, 'expires_at', now_s + WINDOW_MS / 1000,
    'window_ms', ledger_now() + WINDOW_MS)
  enter(ARGV[1], 'validating')
  redis.call('ZADD', UNFINISHED, 0, ARGV[1])
  shared[2] = UNFINISHED
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
for _, key in ipairs(shared) do
  if redis.call('PTTL', key) < tonumber(ARGV[2]) then redis.call('PEXPIRE', key, ARGV[2]) end
end
return {'made', ARGV[1]}
