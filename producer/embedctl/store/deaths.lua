-- The fate of a lapsed lease's owner: alive, dead or silent. Only `reap` decides it.
local function fate(instance)
  local how = redis.call('GET', DIED .. instance)
  if how then return how == LEFT and 'alive' or 'dead' end
  local until_ms = redis.call('ZSCORE', WORKERS, instance)
  return (not until_ms or tonumber(until_ms) < now) and 'silent' or 'alive'
end

-- Two texts of this job, or three of its tenant's, killed workers, and where there are so many, there are often more: only
-- quarantine is given any of it until so many of its chunks in a row have come through there, each time twice as many.
local function distrust(whose)
  local until_ms, trials = unpack(redis.call('HMGET', whose, 'distrusted_ms', 'trials'))
  trials = tonumber(trials or TRIALS / 2)
  if tonumber(until_ms or 0) <= now then trials = math.min(trials * 2, MOST_TRIALS) end
  redis.call('HSET', whose, 'distrusted_ms', now + DISTRUST_MS, 'trials', trials, 'trials_left', trials, 'watched_ms',
    now + DISTRUST_MS + WATCH_MS)
  look_by(now + DISTRUST_MS)
end

-- Workers died with chunks of this job, or tenant, in hand, at rows that are not known: it is to `blame` if there were none
-- of others; else `watch` it, from the second time on, because most have no such text or one. Somebody may have killed them.
-- Returns whether to distrust it.
local function judge(whose, word)
  local known = redis.call('HMGET', whose, 'watched_ms', 'mixed_ms')
  local watched_ms, is_first = tonumber(known[1] or 0), now - (known[2] or 0) >= DISTRUST_MS
  if word == 'watch' then redis.call('HSET', whose, 'mixed_ms', now_text) end
  if word == 'blame' or (word == 'watch' and not is_first) then
    redis.call('HSET', whose, 'watched_ms', string.format('%d', math.max(watched_ms, now + WATCH_MS)))
  end
  return word == 'blame' and watched_ms > now
end

-- Whether other tenants have jobs that wait for the queue.
local function others_wait()
  local place = place_of(facts)
  for _, each in ipairs(lists_in(place.queue, 'usual')) do
    for _, tenant in ipairs(redis.call('ZRANGE', each.flows, 0, GATHERED)) do
      local there = {lane = each.lane, tenant = tenant, queue = place.queue, kind = each.kind}
      if tenant ~= place.tenant and redis.call('EXISTS', left_of(there)) == 1 then return true end
    end
  end
end

-- The same of the job's tenant, if no job of it is to blame. It takes one death more than for a job, which may be its only
-- one, and it is distrusted for the sake of others alone.
local function judge_tenant(word)
  local whose = faults()
  if not is_still(whose, 'watched_ms') then word = 'watch' end
  if judge(whose, word) and others_wait() then distrust(whose) end
  redis.call('PEXPIRE', whose, FAULTS_MS)
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
  if row ~= '' then
    local before = redis.call('HGET', job, 'killed_ms')
    redis.call('HSET', job, 'killed_ms', now, 'watched_ms', 0)  -- it is known now which text it was
    if now - (before or 0) < DISTRUST_MS then distrust(job) end
    if is_still(faults(), 'distrusted_ms') then
      distrust(faults())
      redis.call('PEXPIRE', faults(), FAULTS_MS)
    end
  end
  return deaths.unnamed
end

-- End a lapsed lease. Returns what `suspect` returns, or 0 if the owner is alive.
local function end_lease(chunk, became, instance, row)
  redis.call('HDEL', owners, chunk)  -- first: in a full Redis, a script that begins by freeing may go on
  redis.call('HINCRBY', job, 'lapsed', 1)
  return became == 'alive' and 0 or suspect(chunk, instance, row)
end
