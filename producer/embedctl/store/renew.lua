-- Renew the lease of a chunk. ARGV: job, chunk, token, lease, [the row that the owner begins in careful mode, or ''].
-- → ok | done | not_owner
if ended then return {'done'} end
local owner = redis.call('HGET', owners, ARGV[2])
local token, instance, work = (owner or ''):match('^(%S+) (%S+) (%S+)')
if token ~= ARGV[3] then return {'not_owner'} end
if ARGV[5] then redis.call('HSET', owners, ARGV[2], table.concat({token, instance, work, ARGV[5]}, ' ')) end
lease(ARGV[2], ARGV[4])
return {'ok'}
