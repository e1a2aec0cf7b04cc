-- Search a slice of the issued chunks for chunks without a result and without a due time.
-- ARGV: job, first chunk, input key without its chunk, result key without its chunk, slice.
-- → ok <next chunk to look at, or 0 at the end> <chunks issued again> <chunks lost>
if ended then return {'ok', 0, 0, 0} end  -- it ended after the reaper read it; freed chunks are not lost
local from, again, lost = tonumber(ARGV[2]), 0, 0
local to = math.min(from + tonumber(ARGV[5]), tonumber(redis.call('HGET', job, 'next')))
for chunk = from, to - 1 do
  if redis.call('EXISTS', ARGV[4] .. chunk) == 0 and not redis.call('ZSCORE', due, chunk) then
    if redis.call('EXISTS', ARGV[3] .. chunk) == 1 and redis.call('GETBIT', counted, chunk) == 0 then
      schedule(chunk, 0)
      again = again + 1
    elseif not is_drained(chunk) then
      lost = lost + 1
      redis.call('HSETNX', job, 'lost_first', chunk)
      redis.call('HSET', job, 'lost_last', math.max(chunk, tonumber(redis.call('HGET', job, 'lost_last') or chunk)))
    end
  end
end
if lost > 0 then event('lost', lost) end
return {'ok', to - from == tonumber(ARGV[5]) and to or 0, again, lost}
