-- Free what is kept of chunks that nobody needs any more. If Redis came back without what says so, it stays.
-- KEYS: the job, then what is to be freed. ARGV: the chunks of these results, if parts hold them; else none, and the job must
-- have ended early, or be gone. → ok | kept
local state, stopped_by = unpack(redis.call('HMGET', KEYS[1], 'state', 'stopped_by'))
if #ARGV == 0 then
  if state and state ~= 'cancelled' and not stopped_by then return {'kept'} end
  redis.call('UNLINK', unpack(KEYS, 2))
end
for at, chunk in ipairs(ARGV) do
  if redis.call('GETBIT', KEYS[1] .. ':out:drained', chunk) == 1 then redis.call('UNLINK', KEYS[at + 1]) end
end
return {'ok'}
