-- The owner gives a chunk back unfinished; its ticket is due after a delay.
-- ARGV: job, chunk, token, delay, what went wrong or ''. → ok | not_owner
local owner = redis.call('HGET', owners, ARGV[2])
if not owner or owner:match('^%S+') ~= ARGV[3] then return {'not_owner'} end
redis.call('HDEL', owners, ARGV[2])
schedule(ARGV[2], ARGV[4])
if ARGV[5] ~= '' then redis.call('HSET', job, 'trouble', 'chunk ' .. ARGV[2] .. ': ' .. ARGV[5]) end
return {'ok'}
