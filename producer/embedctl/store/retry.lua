-- Put a chunk's failed records into a new chunk of an ended job. The job is then open until it is sealed again.
-- KEYS[2..5]: producer, input of the failed records, pointer to the new chunk, input of the new chunk.
-- ARGV: job, chunk, new chunk, token, lease. → ok <records> | nothing | busy | held | stopped | gap <chunks>
--   | full <limit> <its value> <what the tenant has> <tenant>
local input, pointer = KEYS[3], KEYS[4]
if facts.stopped_by then return {'stopped'} end
if not ended and (sealed or not original or facts.resumed_to) then return {'busy'} end
local rows = rows_of(input)
local full = ended and quota and rows > 0 and without_room_for(quota_of(quota, ARGV[1]), rows, size_of(input))
if full then
  full[5] = facts.tenant or TENANT
  return full
end
if not take(KEYS[2], ARGV[4], ARGV[5]) then return {'held'} end
if redis.call('GET', pointer) == ARGV[3] then return {'ok', rows_of(KEYS[5])} end  -- done before; the answer was lost
-- An uncounted chunk has not failed but waits, such as a chunk that this retry made before it died.
if redis.call('GETBIT', counted, ARGV[2]) == 0 or redis.call('EXISTS', pointer) == 1 or rows == 0 then
  return {'nothing'}
end
local added = tonumber(facts.added)
if tonumber(ARGV[3]) ~= added then return {'gap', added} end
redis.call('HINCRBY', job, 'waiting_bytes', size_of(input))
redis.call('RENAME', input, KEYS[5])
redis.call('PEXPIRE', KEYS[5], keep_ms)
redis.call('SET', pointer, added, 'PX', keep_ms)
redis.call('HINCRBY', job, 'failed', -rows)
store(KEPT_CHUNK)
redis.call('HSET', job, 'added', added + 1, 'sealed', '0')
reopen('submitting')
progress()
account()
offer()
return {'ok', rows}
