-- Choose issued chunks that need another ticket: their lease lapsed, or no worker took the last ticket. An owner's death
-- makes its chunk suspect. If the owner was in careful mode, its current row is given up.
-- KEYS[9..10]: live workers of the queue, jobs that wait for one. ARGV: job, first reissue after, longest wait, most
-- chunks, how long an owner in careful mode may be silent, deaths without a row until the chunk is stuck, time before
-- which all tickets sent have left the queue, shortest time until the next look, time without progress until an audit.
-- → ok <chunk>… | idle
if ended then return {'ok'} end
local first, longest, soonest, audit_after = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[8]), tonumber(ARGV[9])
if redis.call('ZCOUNT', KEYS[9], now, '+inf') == 0 then
  park(KEYS[10])
  rest(soonest, audit_after, longest, true)
  return {'idle'}
end
local again = {'ok'}
local overdue = redis.call('ZRANGEBYSCORE', due, '-inf', now, 'WITHSCORES', 'LIMIT', 0, ARGV[4])
for at = 1, #overdue, 2 do
  local chunk, due_at, wait, send = overdue[at], tonumber(overdue[at + 1]), first, true
  local owner = redis.call('HGET', owners, chunk)
  local instance, row = (owner or ''):match('^%S+ (%S+) ?(%S*)$')
  local became = owner and fate(instance)
  if not owner then
    wait, send = remind(chunk, due_at, first, longest, tonumber(ARGV[7]))
  elseif row ~= '' and became ~= 'dead' and now - due_at < tonumber(ARGV[5]) then
    wait, send = nil, false  -- wait longer before silence alone blames a record
  else
    local unnamed = end_lease(chunk, became, instance, row)
    if unnamed >= tonumber(ARGV[6]) then wait, send = math.min(first * 2 ^ (unnamed - ARGV[6]), longest), false end
  end
  if wait then schedule(chunk, wait, send or not owner) end
  if send then again[#again + 1] = chunk end
end
rest(soonest, audit_after, longest, false)
return again
