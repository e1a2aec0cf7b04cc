-- Choose the chunks whose tickets the caller sends now, as many as the job's window has room for.
-- KEYS[9]: live workers of the queue. ARGV: job, tickets per worker, reissue after.
-- → ok <chunk>…
if ended then return {'ok'} end
local facts = redis.call(
  'HMGET', job, 'next', 'added', 'window', 'resumed_to', 'resumed_by', 'results_high_water', 'result_bytes',
  'drained_next'
)
local chunk, added = tonumber(facts[1]), tonumber(facts[2])
-- A stopped job that is resumed has no text yet for the chunks that its producer has not reached.
if facts[4] and redis.call('GET', job .. ':producer') == facts[5] then added = tonumber(facts[4]) end
-- The job waits for its drainer. The chunk that the drainer waits for is issued in any case.
if drains and tonumber(facts[7] or 0) > tonumber(facts[6]) and chunk > tonumber(facts[8] or 0) then return {'ok'} end
local live = redis.call('ZCOUNT', KEYS[9], now, '+inf')
local room = math.max(tonumber(facts[3]), live * tonumber(ARGV[2])) - redis.call('ZCARD', due)
local issued, looked = {'ok'}, 0
while room > 0 and chunk < added and looked < 1000 do
  -- After Redis lost writes in a crash, an older ticket may have led to a claim or a result of this chunk already.
  if not redis.call('ZSCORE', due, chunk) and redis.call('EXISTS', job .. ':out:' .. chunk) == 0
    and not is_drained(chunk) then
    schedule(chunk, ARGV[3], true)
    issued[#issued + 1] = chunk
    room = room - 1
  end
  chunk, looked = chunk + 1, looked + 1
end
if looked > 0 then redis.call('HSET', job, 'next', chunk) end
if room > 0 and chunk < added then look_by(now) end
return issued
