-- KEYS[9]: producer. ARGV: job, token, lease. → ok | held | sealed
if sealed then return {'sealed'} end
return {hold(KEYS[9], ARGV[2], ARGV[3]) and 'ok' or 'held'}
