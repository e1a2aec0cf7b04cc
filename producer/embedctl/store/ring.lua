-- Ring for the queues of a worker that have chunks which are ready, and no bell. A bell that was lost costs the time until
-- the next call. ARGV: precision, then queues, each with a fingerprint. → ok
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
for at = 2, #ARGV, 2 do
  local kinds = {kind_of(ARGV[1], ARGV[at + 1]), kind_of(ARGV[1], '*')}
  if not has_quarantine(ARGV[at], now_ms) then
    for kind = 1, 2 do kinds[2 + kind] = APART .. kinds[kind] end
  end
  if redis.pcall('LLEN', ARGV[at]) == 0 and is_listed(ARGV[at], kinds) then ring(ARGV[at], 1, now_ms) end
end
-- What a killed worker had heard is here for good if no worker comes back, which would put it into the queue again.
for _, key in ipairs(UNACKED) do keep(key) end
return {'ok'}
