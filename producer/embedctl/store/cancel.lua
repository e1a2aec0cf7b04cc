-- End a job now. The reaper frees it in slices; its idempotency key can make a new job. ARGV: job. → ok | ended <state>
if ended then return {'ended', state} end
redis.call('UNLINK', owners, attempts, ready, suspects)  -- first: in a full Redis, a script that begins by freeing may go on
take_off()
redis.call('HSET', job, 'ended_ms', now, 'waiting_bytes', 0)
enter('cancelled')
look_by(now)
progress()
account()
local idempotency = redis.call('HGET', job, 'idempotency_key')
if idempotency then redis.call('UNLINK', idempotency) end
return {'ok'}
