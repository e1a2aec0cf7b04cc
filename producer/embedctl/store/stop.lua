-- End a job now and keep what is done. Its idempotency key still finds it, so that its corpus can resume it.
-- ARGV: job. → ok | ended <state>
if ended then return {'ended', state} end
stop('stop')
progress()
account()
redis.call('PEXPIRE', events, ENDED_EVENTS_MS)
return {'ok'}
