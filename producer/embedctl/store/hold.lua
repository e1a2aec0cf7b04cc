-- KEYS[2]: producer. ARGV: job, token, lease. → ok | held | sealed
if sealed then return {'sealed'} end
-- PEXPIRE renews the producer's own lease even in a full Redis, which refuses SET. Other scripts must not do this: after
-- such a first write, Redis would let them go on and store something.
if redis.call('GET', KEYS[2]) == ARGV[2] then
  redis.call('PEXPIRE', KEYS[2], ARGV[3])
elseif not take(KEYS[2], ARGV[2], ARGV[3]) then
  return {'held'}
end
if facts.added == '0' then live(UNBEGUN_TTL_MS) end
return {'ok'}
