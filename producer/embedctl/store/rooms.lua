-- Shared by the scripts that take room for a call of a tenant, or give it back. A gateway holds its room for the time of its
-- lease, which it renews by stating all that it holds: so what a lost answer or a killed gateway leaves is free again soon.
-- `asked` is the gateway's JSON: its name (`gateway`), its lease in ms (`lease_ms`), `tenant`, what is to be taken (`take`: of
-- each kind its name, how much, the most of all tenants, and whether it is held for as long as a caller likes), how many texts
-- are added next (`texts`), what is given back (`give`: `kind tenant` → how much), and perhaps all that the gateway holds
-- otherwise (`holds`, in the same form).
local SUMS, GATEWAYS, HELD, WHO = LEDGER .. 'sums', LEDGER .. 'gateways', LEDGER .. 'held:', LEDGER .. 'who:'

local function hold(holder, field, amount)
  local had = tonumber(redis.call('HGET', HELD .. holder, field) or 0)
  amount = math.max(amount, 0 - had)  -- what Redis has lost is not given back
  redis.call(had + amount > 0 and 'HSET' or 'HDEL', HELD .. holder, field, had + amount)
  for _, sum in ipairs({field, field:match('^%S+')}) do
    if redis.call('HINCRBY', SUMS, sum, amount) <= 0 then redis.call('HDEL', SUMS, sum) end
  end
end

local function keep(gateway)
  for _, key in ipairs({SUMS, GATEWAYS, HELD .. gateway}) do redis.call('PEXPIRE', key, KEPT_MS) end
end

-- Hear of a gateway: renew its lease, note what it gives back, and free what is held by those that are silent.
local function hear(asked)
  local at = ledger_now()
  redis.call('ZADD', GATEWAYS, at + asked.lease_ms, asked.gateway)
  for field, amount in pairs(asked.give) do hold(asked.gateway, field, 0 - amount) end
  for _, gone in ipairs(redis.call('ZRANGEBYSCORE', GATEWAYS, '-inf', at, 'LIMIT', 0, 8)) do
    local held = redis.call('HGETALL', HELD .. gone)
    for each = 1, #held, 2 do hold(gone, held[each], 0 - held[each + 1]) end
    redis.call('ZREM', GATEWAYS, gone)
  end
  if asked.holds then
    local held = redis.call('HGETALL', HELD .. asked.gateway)
    for each = 1, #held, 2 do
      if not asked.holds[held[each]] then hold(asked.gateway, held[each], 0 - held[each + 1]) end
    end
    for field, amount in pairs(asked.holds) do
      hold(asked.gateway, field, amount - (redis.call('HGET', HELD .. asked.gateway, field) or 0))
    end
  end
  keep(asked.gateway)
  return at
end

-- Why there is no room for what is asked, as of this time: {'full' or 'share', kind}; nil if there is.
local function without_place(asked, at)
  for _, each in ipairs(asked.take) do
    local kind, amount, most, is_long = unpack(each)
    local who = WHO .. kind
    redis.call('ZADD', who, at, asked.tenant)
    for _, other in ipairs(redis.call('ZRANGEBYSCORE', who, '-inf', at - LATELY_MS, 'LIMIT', 0, 100)) do
      local has = redis.call('HEXISTS', SUMS, kind .. ' ' .. other) == 1
      redis.call(has and 'ZADD' or 'ZREM', who, unpack(has and {at, other} or {other}))
    end
    redis.call('PEXPIRE', who, KEPT_MS)
    local all, own = unpack(redis.call('HMGET', SUMS, kind, kind .. ' ' .. asked.tenant))
    all, own = tonumber(all or 0), tonumber(own or 0)
    if all > 0 and all + amount > most then return {'full', kind} end
    -- The last part is for tenants below their share. Of what is held for long, each may have as much as is free then: one
    -- alone has half, two have a third each, and something is left for who is yet to come.
    local is_last = all + amount > most - math.max(1, math.floor(most / RESERVE)) and own >= most / redis.call('ZCARD', who)
    if is_long then is_last = own + amount > most - all end
    if all > 0 and is_last then return {'share', kind} end
  end
end

local function take_place(asked)
  for _, each in ipairs(asked.take) do hold(asked.gateway, each[1] .. ' ' .. asked.tenant, each[2]) end
  keep(asked.gateway)
end
