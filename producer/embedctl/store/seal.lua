-- No more chunks will come. KEYS[8]: producer. ARGV: job, number of chunks. → ok <state> | sealed <chunks> | gap <chunks>
local added = tonumber(redis.call('HGET', job, 'added'))
if sealed then return {'sealed', added} end
if tonumber(ARGV[2]) ~= added then return {'gap', added} end
sealed = true
redis.call('HSET', job, 'sealed', '1')
redis.call('UNLINK', KEYS[8])
enter(redis.call('HEXISTS', job, 'started_ms') == 1 and 'running' or 'queued')
end_if_done()
progress()
return {'ok', state}
