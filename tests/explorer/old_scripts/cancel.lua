-- End a job now; the reaper frees it in slices, and its idempotency key may make a new one. ARGV: job. → ok | ended <state>
if ended then return {'ended', state} end
redis.call('UNLINK', due, owners, attempts, reissues)  -- first: a full Redis lets a script go on that began by freeing
redis.call('HSET', job, 'ended_ms', now)
enter('cancelled')
progress()
local idempotency = redis.call('HGET', job, 'idempotency_key')
if idempotency then redis.call('UNLINK', idempotency) end
return {'ok'}
