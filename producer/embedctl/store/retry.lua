-- Put a chunk's failed records into a new chunk of an ended job, which is then open until it is sealed again.
-- KEYS[8..11]: producer, input of the failed records, pointer to the new chunk, input of the new chunk.
-- ARGV: job, new chunk, token, lease. → ok <records> | nothing | busy | held | stopped | gap <chunks>
local input, pointer = KEYS[9], KEYS[10]
if redis.call('HGET', job, 'stopped_by') then return {'stopped'} end
if not ended and not (original and not sealed) then return {'busy'} end
if not hold(KEYS[8], ARGV[3], ARGV[4]) then return {'held'} end
if redis.call('EXISTS', pointer) == 1 or redis.call('EXISTS', input) == 0 then return {'nothing'} end
local added = tonumber(redis.call('HGET', job, 'added'))
if tonumber(ARGV[2]) ~= added then return {'gap', added} end
local rows = struct.unpack('<I4', redis.call('GETRANGE', input, ROWS_AT, ROWS_AT + 3))
redis.call('HINCRBY', job, 'waiting_bytes', redis.call('STRLEN', input))
redis.call('RENAME', input, KEYS[11])
redis.call('PEXPIRE', KEYS[11], keep_ms)
redis.call('SET', pointer, added, 'PX', keep_ms)
redis.call('HINCRBY', job, 'failed', -rows)
redis.call('HSET', job, 'added', added + 1, 'sealed', '0')
redis.call('HDEL', job, 'ended_ms')
redis.call('ZADD', active, now, ARGV[1])
if ended then enter('submitting') end
progress()
return {'ok', rows}
