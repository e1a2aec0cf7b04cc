-- The owner of a lease is alive. ARGV: job, chunk, token, lease. → ok | done | not_owner
if ended then return {'done'} end
local owner = redis.call('HGET', owners, ARGV[2])
if not owner or owner:match('^%S+') ~= ARGV[3] then return {'not_owner'} end
schedule(ARGV[2], ARGV[4])
return {'ok'}
