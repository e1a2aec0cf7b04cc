-- Let chunks whose lease lapsed be taken again. An owner's death makes its chunk suspect. If the owner was in careful mode,
-- its current row is given up.
-- ARGV: job, pause of a stuck chunk, its longest pause, most chunks, how long an owner in careful mode may be silent,
-- deaths without a row until the chunk is stuck, shortest time until the next look, time without progress until an audit,
-- 1 to judge only owners that are known to have died, else 0; what these deaths say of the job, and of its tenant:
-- `blame`, `watch` or ''.
-- → ok <chunk>…
if ended then return {'ok'} end
local stuck_ms, longest, soonest, audit_after = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[7]), tonumber(ARGV[8])
local again, word, of_tenant = {'ok'}, '', ''
local next_end, held = math.huge, redis.call('HGETALL', owners)
for at = 1, #held, 2 do
  local chunk, instance, claims, until_ms, row = held[at], held[at + 1]:match('^%S+ (%S+) %S+ (%d+) (%d+) ?(%S*)$')
  local ends_ms = tonumber(until_ms or 0)
  local became = ends_ms <= now and (instance and fate(instance) or 'alive')
  local is_judged = became == 'dead' or (became and ARGV[9] == '0')
  -- Silence alone blames a record only after longer.
  if is_judged and #again <= tonumber(ARGV[4])
    and (not row or row == '' or became == 'dead' or now - ends_ms >= tonumber(ARGV[5])) then
    local unnamed = end_lease(chunk, became, instance, row) - ARGV[6]
    put_back(chunk, unnamed < 0 and 0 or math.min(stuck_ms * 2 ^ unnamed, longest), claims)
    again[#again + 1] = chunk
    if became ~= 'alive' and row == '' then word, of_tenant = ARGV[10], ARGV[11] end
  else
    next_end = math.min(next_end, ends_ms)
  end
end
if word ~= '' and judge(job, word) then
  distrust(job)
elseif of_tenant ~= '' then
  judge_tenant(of_tenant)
end
-- If a worker died before it encoded any of it, any worker may begin it again.
if facts.chunks_done == '0' and redis.call('EXISTS', owners) == 0
  and redis.call('HEXISTS', job, 'model_fingerprint') == 1 then
  take_off()
  redis.call('HDEL', job, 'model_fingerprint', 'pinned_by')
end
offer(math.max(1, #again - 1))

-- Look at a job without progress after ever longer pauses, but in time for leases, for chunks that are put off, for the end
-- of distrust, and for renewing lifetimes.
local rested = now - redis.call('HGET', job, 'progressed_ms')
local wait = math.min(rested < audit_after and audit_after - rested or rested, longest, ttl_ms / 16, next_end - now)
for _, key in ipairs({ready, suspects}) do
  local next_at = redis.call('ZRANGEBYSCORE', key, string.format('(%.0f', now), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
  if next_at then wait = math.min(wait, next_at - now) end
end
local trusted_ms = tonumber(redis.call('HGET', job, 'distrusted_ms') or 0)
if trusted_ms > now then wait = math.min(wait, trusted_ms - now) end
if redis.call('ZADD', UPKEEP, math.floor(now + math.max(wait, soonest)), ARGV[1]) == 1 then share() end
return again
