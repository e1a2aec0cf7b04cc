-- Make a file or a batch, once for all tries of a request.
-- KEYS: its hash, its tenant's set, what the request has made.
-- ARGV: id, time to live, 1 if this is a further try of the request else 0, time for which tries are recognised, the digest
-- of the request, its size in bytes, the most bytes and the most files or batches that a tenant keeps, then fields and values.
-- → made <id> | exists <id> | other | full
-- If the answer was lost, the client asks again.
if redis.call('EXISTS', KEYS[1]) == 1 then return {'made', ARGV[1]} end
local first, again, digest = string.match(redis.call('GET', KEYS[3]) or '', '^(%S+) (%d) (%S+)$')
if first and digest ~= ARGV[5] then return {'other'} end
-- The first try may come after a further one.
local kind = KEYS[1]:sub(1, -#ARGV[1] - 1)
if first and (ARGV[3] == '1' or again == '1') and redis.call('EXISTS', kind .. first) == 1 then return {'exists', first} end
local size, most_bytes, most = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
-- The last bytes are for what is small.
local function is_full()
  local bytes = tonumber(redis.call('HGET', KEPT, KEYS[2]) or 0)
    + tonumber(redis.call('HGET', KEPT_BY .. KEYS[2]:sub(#FILES + 1), 'sum') or 0)
  local room = size <= SMALL_BYTES and most_bytes or most_bytes - most_bytes / RESERVE
  return redis.call('ZCARD', KEYS[2]) >= most or (size > 0 and bytes + size > room)
end
local is_lost = size > 0 and redis.call('HEXISTS', KEPT, KEYS[2]) == 0 and redis.call('EXISTS', KEYS[2]) == 1
-- What has expired is counted until room is short: then all is counted anew, once in a while.
if (is_lost or is_full()) and redis.call('SET', LEDGER .. 'counted:' .. KEYS[2], 1, 'NX', 'PX', LATELY_MS) then
  local bytes = 0
  for _, id in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
    local fact = redis.call('HGET', kind .. id, kind == BATCH and 'status' or 'size')
    if fact then bytes = bytes + (tonumber(fact) or 0) else redis.call('ZREM', KEYS[2], id) end
  end
  redis.call('HDEL', KEPT, KEYS[2])
  keep_bytes(KEYS[2], bytes)
end
if is_full() then return {'full'} end
keep_bytes(KEYS[2], size)
redis.call('SET', KEYS[3], ARGV[1] .. ' ' .. ARGV[3] .. ' ' .. ARGV[5], 'PX', ARGV[4])
redis.call('HSET', KEYS[1], unpack(ARGV, 9))
redis.call('ZADD', KEYS[2], 0, ARGV[1])
if kind == BATCH then
  redis.call('HSET', KEYS[1], 'created_at', now_s, 'expires_at', now_s + WINDOW_MS / 1000,
    'window_ms', ledger_now() + WINDOW_MS)
  enter(ARGV[1], 'validating')
  look_at(ARGV[1], redis.call('HGET', KEYS[1], 'tenant'), 0)
else
  keep_parts(KEYS[1], ARGV[2])
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
if redis.call('PTTL', KEYS[2]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[2], ARGV[2]) end
return {'made', ARGV[1]}
