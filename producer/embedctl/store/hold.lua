-- KEYS[9]: producer. ARGV: job, token, lease. → ok | held | sealed
if sealed then return {'sealed'} end
-- PEXPIRE renews the producer's own lease even in a full Redis, which refuses SET. Other scripts must not do this: after
-- such a first write, Redis would let them go on and store something.
if redis.call('GET', KEYS[9]) == ARGV[2] then
  redis.call('PEXPIRE', KEYS[9], ARGV[3])
  return {'ok'}
end
return {take(KEYS[9], ARGV[2], ARGV[3]) and 'ok' or 'held'}
