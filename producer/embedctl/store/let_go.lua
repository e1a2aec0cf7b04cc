-- Free chunks of a job that has ended early. With the other arguments, that is a slice, and after the last one the reaper looks
-- after the job no longer. If Redis came back without the job's end, or at an earlier slice, nothing is done.
-- KEYS: the job, then what is to be freed. ARGV: [job, name of the cursor, first chunk, next chunk, or '' after the last one].
-- → ok | kept
local job, cursors = KEYS[1], KEYS[1] .. ':cursors'
local state, stopped_by, ttl_ms, stored = unpack(redis.call('HMGET', job, 'state', 'stopped_by', 'ttl_ms', 'kept_bytes'))
if state and state ~= 'cancelled' and not stopped_by then return {'kept'} end
if ARGV[1] and (redis.call('HGET', cursors, ARGV[2]) or '0') ~= ARGV[3] then return {'kept'} end
local freed = 0
for at = 2, stored and #KEYS or 1 do freed = freed + redis.call('STRLEN', KEYS[at]) end
if #KEYS > 1 then redis.call('UNLINK', unpack(KEYS, 2)) end
if freed > 0 then redis.call('HINCRBY', job, 'kept_bytes', -freed) end
if ARGV[4] == '' then
  for _, of in ipairs(state == 'cancelled' and {'', ':events', ':counted', ':out:drained', ':out:parts', ':out:digests'} or {}) do
    redis.call('PEXPIRE', job .. of, ttl_ms)
  end
  if stored and state == 'cancelled' then redis.call('HSET', job, 'kept_bytes', 0) end
  redis.call('UNLINK', cursors)
  for _, members in ipairs({ACTIVE, UPKEEP}) do redis.call('ZREM', members, ARGV[1]) end
elseif ARGV[1] then
  redis.call('HSET', cursors, ARGV[2], ARGV[4])
  redis.call('PEXPIRE', cursors, math.max(1, redis.call('PTTL', job)))
end
return {'ok'}
