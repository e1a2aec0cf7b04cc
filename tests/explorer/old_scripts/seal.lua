-- No more chunks will come. KEYS[9]: producer. ARGV: job, number of chunks. → ok <state> | sealed <chunks> | gap <chunks>
local added = tonumber(redis.call('HGET', job, 'added'))
-- A job whose failed records are being retried has more chunks than its corpus made.
local chunks = tonumber(ARGV[2])
if sealed and chunks == added then return {'ok', state} end  -- said before, and the answer was lost
if sealed or (original and chunks == original and original < added) then return {'sealed', original} end
if tonumber(ARGV[2]) ~= added then return {'gap', added} end
sealed = true
redis.call('HSET', job, 'sealed', '1')
redis.call('HSETNX', job, 'original_chunks', added)
redis.call('UNLINK', KEYS[9])
enter(redis.call('HEXISTS', job, 'started_ms') == 1 and 'running' or 'queued')
end_if_hopeless()
end_if_done()
progress()
return {'ok', state}
