-- Open a stopped job again for a producer that adds its corpus once more. Chunks with a result stay as they are; the text
-- of the others, from `resumed_to` up to `resumed_below`, does not count as waiting until it is added again.
-- KEYS[2]: producer. ARGV: job, token, lease. → ok | held | retried
if facts.stopped_by ~= 'stop' then return {'ok'} end
local added = tonumber(facts.added)
-- The corpus does not hold the failed records by themselves, and their text may be freed.
if original and original ~= added then return {'retried'} end
if not take(KEYS[2], ARGV[2], ARGV[3]) then return {'held'} end
redis.call('HDEL', job, 'stopped_by', 'lost_first', 'lost_last')
redis.call('HSET', job, 'sealed', '0', 'next', 0)
if added > 0 then
  local left = waiting_of(facts.records, facts.done, facts.failed)
  redis.call('HSET', job, 'resumed_to', 0, 'resumed_below', added, 'resumed_by', ARGV[2], 'resumed_records', left)
end
reopen('submitting')
progress()
account()
return {'ok'}
