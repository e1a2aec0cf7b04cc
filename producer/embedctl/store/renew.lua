-- Renew the lease of a chunk. ARGV: job, chunk, token, lease, [the row that the owner begins in careful mode, or ''].
-- → ok | done | not_owner
if ended then return {'done'} end
local owner, row = (redis.call('HGET', owners, ARGV[2]) or ''):match('^(%S+ %S+ %S+ %S+) %S+ ?(%S*)$')
if not owner or owner:match('^%S+') ~= ARGV[3] then return {'not_owner'} end
lease(ARGV[2], owner, ARGV[4], ARGV[5] or row)
return {'ok'}
