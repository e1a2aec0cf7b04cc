-- End a job now; the reaper frees it in slices, and its idempotency key may make a new one. ARGV: job. → ok | ended <state>
if ended then return {'ended', state} end
redis.call('UNLINK', due, owners, attempts, reissues)  -- first: a full Redis lets a script go on that began by freeing
redis.call('HSET', job, 'ended_ms', now, 'waiting_bytes', 0)
enter('cancelled')
look_by(now)
progress()
if idempotency then redis.call('UNLINK', idempotency) end
return {'ok'}
