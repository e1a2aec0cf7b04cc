-- Search a slice of the chunks that were given out for those without a result that nobody has and that are not ready.
-- ARGV: job, first chunk, input key without its chunk, result key without its chunk, slice.
-- → ok <next chunk to look at, or 0 at the end> <chunks that are ready again> <chunks lost>
if ended then return {'ok', 0, 0, 0} end  -- it ended after the reaper read it; freed chunks are not lost
local from, again, lost = tonumber(ARGV[2]), 0, 0
local to = math.min(from + tonumber(ARGV[5]), tonumber(facts.next))
for chunk = from, to - 1 do
  if redis.call('EXISTS', ARGV[4] .. chunk) == 0 and redis.call('HEXISTS', owners, chunk) == 0
    and not redis.call('ZSCORE', ready, chunk) and not redis.call('ZSCORE', suspects, chunk) then
    if redis.call('EXISTS', ARGV[3] .. chunk) == 1 and redis.call('GETBIT', counted, chunk) == 0 then
      put_back(chunk, 0)
      again = again + 1
    elseif not is_drained(chunk) then
      lost = lost + 1
      redis.call('HSETNX', job, 'lost_first', chunk)
      redis.call('HSET', job, 'lost_last', math.max(chunk, tonumber(redis.call('HGET', job, 'lost_last') or chunk)))
    end
  end
end
if lost > 0 then event('lost', lost) end
offer(again)
return {'ok', to - from == tonumber(ARGV[5]) and to or 0, again, lost}
