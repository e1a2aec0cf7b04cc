-- Give an unfinished chunk back; it needs a ticket after the delay.
-- ARGV: job, chunk, token, delay, what went wrong or '', [doubts: failures of this owner and of earlier ones].
-- → ok | not_owner
local owner = redis.call('HGET', owners, ARGV[2])
if not owner or owner:match('^%S+') ~= ARGV[3] then return {'not_owner'} end
redis.call('HDEL', owners, ARGV[2])
schedule(ARGV[2], ARGV[4])
if ARGV[5] ~= '' then redis.call('HSET', job, 'trouble', 'chunk ' .. ARGV[2] .. ': ' .. ARGV[5]) end
if ARGV[6] then
  redis.call('HSET', attempts, ARGV[2] .. ':doubts', ARGV[6])
  redis.call('PEXPIRE', attempts, keep_ms)
end
return {'ok'}
