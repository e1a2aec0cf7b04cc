-- Seal a job: no more chunks will come. KEYS[2]: producer. ARGV: job, number of chunks, or '' from the reaper after a
-- retry died, [token that the job was made with].
-- → ok <state> [<its event>] | held | stopped | sealed <chunks> | gap <chunks>
local added, chunks = tonumber(facts.added), tonumber(ARGV[2])
if not is_made_with(ARGV[3]) then return {'held'} end
if not chunks and (not original or redis.call('EXISTS', KEYS[2]) == 1) then return {'held'} end
if ended and not sealed then return {'stopped'} end
-- A job whose failed records are being retried has more chunks than its corpus made. Its corpus is complete even if the
-- retry died, [token that the job was made with].
if not chunks or (original and not sealed and chunks == original) then chunks = added end
if sealed and chunks ~= added then return {'sealed', original} end
if sealed and state ~= 'submitting' then return {'ok', state} end  -- sealed before; the answer was lost
if chunks ~= added then return {'gap', added} end
sealed = true
redis.call('HSET', job, 'sealed', '1')
redis.call('HSETNX', job, 'original_chunks', added)
redis.call('UNLINK', KEYS[2])
local entered = enter(facts.started_ms and 'running' or 'queued')
end_if_due()
progress()
account()
if not ended then list_all(place_of(facts)) end  -- in case that Redis lost that; adding a chunk rang
return {'ok', state, entered}
