-- Functions of `reap`: whether a chunk's ticket is still on its way, and when the reaper looks at a job again.

-- When the ticket of a chunk without owner was sent; nil if it has none. The first ticket's time follows from its due time.
local function ticket_sent(chunk, due_at, first)
  local known = redis.call('HMGET', reissues, chunk, chunk .. ':sent')
  if due_at % 1 == 0 then return nil end
  if not known[1] then return due_at - first end
  return known[2] and tonumber(known[2]) or nil
end

-- For a ticket that no worker took: the time until the next look, and whether to send another ticket. Unless the ticket
-- is older than all in the queue, it is still there, and another one would only make the queue longer.
local function remind(chunk, due_at, first, longest, taken_before)
  local sent = ticket_sent(chunk, due_at, first)
  local send = not sent or sent < taken_before
  local wait = math.min(first * 2 ^ redis.call('HINCRBY', reissues, chunk, 1), longest)
  redis.call('HSET', reissues, chunk .. ':sent', send and now or sent)
  redis.call('PEXPIRE', reissues, keep_ms)
  return wait, send
end

-- Park a job that waits for a worker of its queue; the first worker to arrive wakes it.
local function park(idle)
  redis.call('ZADD', idle, now + redis.call('PTTL', job), ARGV[1])
  local expired = redis.call('ZRANGEBYSCORE', idle, '-inf', now, 'LIMIT', 0, 10)
  if #expired > 0 then redis.call('ZREM', idle, unpack(expired)) end
  if redis.call('PTTL', idle) < keep_ms then redis.call('PEXPIRE', idle, keep_ms) end
end

-- Look at a job without progress after ever longer pauses, but in time for due chunks and for renewing lifetimes.
local function rest(soonest, audit_after, longest, idle)
  local rested = now - tonumber(progressed)
  local wait = math.min(rested < audit_after and audit_after - rested or rested, longest, ttl_ms / 16)
  local first = not idle and redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')[2]
  if first then wait = math.min(wait, first - now) end
  if redis.call('ZADD', UPKEEP, math.floor(now + math.max(wait, soonest)), ARGV[1]) == 1 then share() end
end
