-- Give an unfinished chunk back; it may be taken again after the delay.
-- ARGV: job, chunk, token, delay, what went wrong or '', doubts (failures of this owner and of earlier ones) or '', [the time
-- for which other workers come first].
-- → ok | not_owner
local token, instance, claims = (redis.call('HGET', owners, ARGV[2]) or ''):match('^(%S+) (%S+) %S+ (%d+)')
if token ~= ARGV[3] then return {'not_owner'} end
put_back(ARGV[2], ARGV[4], claims)
if ARGV[5] ~= '' then redis.call('HSET', job, 'trouble', 'chunk ' .. ARGV[2] .. ': ' .. ARGV[5]) end
if ARGV[6] ~= '' then
  redis.call('HSET', attempts, ARGV[2] .. ':doubts', ARGV[6])
  redis.call('PEXPIRE', attempts, keep_ms)
end
if ARGV[7] then redis.call('HSET', attempts, ARGV[2] .. ':not', string.format('%s %.0f', instance, now + ARGV[7])) end
offer()
return {'ok'}
