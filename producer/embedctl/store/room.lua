-- Take room for a call of a tenant, or give it back. A gateway holds its room for the time of its lease, which it renews by
-- stating all that it holds: so what a lost answer or a killed gateway leaves is free again soon.
-- ARGV: gateway, its lease in ms, tenant, then of each kind: its name, how much is taken (or given back, below 0), the most of
-- all tenants, and 1 if it is held for as long as a caller likes. Without a tenant: `kind tenant` and how much of it, each.
-- → ok | full <kind> | share <kind>
local gateway, tenant = ARGV[1], ARGV[3]
local SUMS, GATEWAYS, HELD, WHO = LEDGER .. 'sums', LEDGER .. 'gateways', LEDGER .. 'held:', LEDGER .. 'who:'
now = ledger_now()

local function add(holder, field, amount)
  local had = tonumber(redis.call('HGET', HELD .. holder, field) or 0)
  amount = math.max(amount, 0 - had)  -- what Redis has lost is not given back
  redis.call(had + amount > 0 and 'HSET' or 'HDEL', HELD .. holder, field, had + amount)
  for _, sum in ipairs({field, field:match('^%S+')}) do
    if redis.call('HINCRBY', SUMS, sum, amount) <= 0 then redis.call('HDEL', SUMS, sum) end
  end
end

redis.call('ZADD', GATEWAYS, now + ARGV[2], gateway)
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', GATEWAYS, '-inf', now, 'LIMIT', 0, 8)) do
  local held = redis.call('HGETALL', HELD .. gone)
  for at = 1, #held, 2 do add(gone, held[at], -held[at + 1]) end
  redis.call('ZREM', GATEWAYS, gone)
end

if tenant == '' then
  local states = {}
  for at = 4, #ARGV, 2 do states[ARGV[at]] = tonumber(ARGV[at + 1]) end
  local held = redis.call('HGETALL', HELD .. gateway)
  for at = 1, #held, 2 do
    if not states[held[at]] then add(gateway, held[at], -held[at + 1]) end
  end
  for field, amount in pairs(states) do
    add(gateway, field, amount - (redis.call('HGET', HELD .. gateway, field) or 0))
  end
end

for at = 4, tenant == '' and 0 or #ARGV, 4 do
  local kind, amount, most, is_long = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), ARGV[at + 3] == '1'
  if amount > 0 then
    local who = WHO .. kind
    redis.call('ZADD', who, now, tenant)
    for _, other in ipairs(redis.call('ZRANGEBYSCORE', who, '-inf', now - LATELY_MS, 'LIMIT', 0, 100)) do
      local has = redis.call('HEXISTS', SUMS, kind .. ' ' .. other) == 1
      redis.call(has and 'ZADD' or 'ZREM', who, unpack(has and {now, other} or {other}))
    end
    redis.call('PEXPIRE', who, KEPT_MS)
    local all, own = unpack(redis.call('HMGET', SUMS, kind, kind .. ' ' .. tenant))
    all, own = tonumber(all or 0), tonumber(own or 0)
    if all > 0 and all + amount > most then return {'full', kind} end
    -- The last part is for tenants below their share; of what is held for long, for one that is yet to come, and small calls.
    local share = most / (redis.call('ZCARD', who) + (is_long and 1 or 0))
    local is_last = all > 0 and all + amount > most - math.max(1, math.floor(most / RESERVE))
    if is_last and (own >= share or (is_long and amount > math.max(1, most / 64))) then return {'share', kind} end
  end
end
for at = 4, tenant == '' and 0 or #ARGV, 4 do add(gateway, ARGV[at] .. ' ' .. tenant, tonumber(ARGV[at + 1])) end
for _, key in ipairs({SUMS, GATEWAYS, HELD .. gateway}) do redis.call('PEXPIRE', key, KEPT_MS) end
return {'ok'}
