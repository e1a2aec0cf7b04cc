-- KEYS[9]: producer. ARGV: job, token, lease. → ok | held | sealed
if sealed then return {'sealed'} end
-- Mine is renewed also by a full Redis, which takes no SET. Only here: after this first write it would let a script go on
-- that stores something.
if redis.call('GET', KEYS[9]) == ARGV[2] then
  redis.call('PEXPIRE', KEYS[9], ARGV[3])
  return {'ok'}
end
return {hold(KEYS[9], ARGV[2], ARGV[3]) and 'ok' or 'held'}
