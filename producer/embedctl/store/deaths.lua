-- The fate of a lapsed lease's owner: alive, dead or silent. Only `reap` decides it.
local function fate(instance)
  local how = redis.call('GET', DIED .. instance)
  if how then return how == LEFT and 'alive' or 'dead' end
  local until_ms = redis.call('ZSCORE', WORKERS, instance)
  return (not until_ms or tonumber(until_ms) < now) and 'silent' or 'alive'
end

-- Note a death. Returns how many deaths in a row named no row, without the chunk's first death.
local function suspect(chunk, instance, row)
  local known = redis.call('HGET', attempts, chunk .. ':deaths')
  local deaths = known and cjson.decode(known) or {rows = '', unnamed = -1, history = {}}
  deaths.unnamed = row == '' and deaths.unnamed + 1 or 0
  if row ~= '' then deaths.rows = deaths.rows .. (deaths.rows == '' and '' or ',') .. row end
  table.insert(deaths.history, string.format('%.0f %s %s', now, instance, row))
  if #deaths.history > 10 then table.remove(deaths.history, 1) end
  redis.call('HSET', attempts, chunk .. ':deaths', cjson.encode(deaths))
  redis.call('PEXPIRE', attempts, keep_ms)
  redis.call('HINCRBY', job, 'deaths', 1)
  if row ~= '' then  -- it was this job's text; and where there are two, there are often more
    local before = tonumber(redis.call('HGET', job, 'killed_ms') or 0)
    redis.call('HSET', job, 'killed_ms', now)
    if now - before < DISTRUST_MS then
      redis.call('HSET', job, 'distrusted_ms', now + DISTRUST_MS)
      look_by(now + DISTRUST_MS)
    end
  end
  return deaths.unnamed
end

-- End a lapsed lease. Returns what `suspect` returns, or 0 if the owner is alive.
local function end_lease(chunk, became, instance, row)
  redis.call('HDEL', owners, chunk)
  redis.call('HINCRBY', job, 'lapsed', 1)
  return became == 'alive' and 0 or suspect(chunk, instance, row)
end
