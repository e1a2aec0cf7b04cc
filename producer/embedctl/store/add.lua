-- Store the next chunk's input, or check that an earlier chunk is the same as the stored one.
-- KEYS[2..4]: producer, input, result. ARGV: job, chunk, digest, rows, input or '' to ask only whether it is wanted,
-- token, lease, [the token that the job was made with, if the caller may have met another job of its id].
-- → ok <bytes waiting> | wanted | skipped <bytes waiting> | differs | held | stopped | sealed <chunks> | gap <chunks>
--   | full <limit> <its value> <what the tenant has> <tenant> [what the job would need alone, if there is never so much]
local chunk, rows, input = tonumber(ARGV[2]), tonumber(ARGV[4]), ARGV[5]
if facts.stopped_by then return {'stopped'} end
if not is_made_with(ARGV[8]) or (not sealed and not take(KEYS[2], ARGV[6], ARGV[7])) then return {'held'} end
local added = tonumber(facts.added)

-- The answer if the tenant's limits leave no room for this text.
local limits = quota and quota_of(quota, ARGV[1])
local function no_room()
  local size, full = size_in(input), nil
  if kept then  -- one that has begun leaves a tenth to new jobs
    local records, bytes = waiting_of(facts.records, facts.done, facts.failed, facts.waiting_bytes, facts.resumed_records)
    local then_kept = kept_of(facts.keeps, (facts.kept_bytes or 0) + size + KEPT_CHUNK, records + rows, bytes + size, true)
    local more = then_kept - (redis.call('HGET', kept, ARGV[1]) or 0)
    full = without_keeping(kept, facts.keeps, facts.tenant or TENANT, more, added > 0 and KEPT_PART or 1)
    -- If all before it is encoded, nothing makes room but what is done with other jobs and files.
    if full and records == 0 and not drains then
      local beside = facts.keeps:match('^%S+ %S+ %S+ %S+ %S+ (%S+)$') or 0
      if then_kept + beside > full[3] * KEPT_PART then full[6] = string.format('%.0f', then_kept + beside) end
    end
  end
  if full or not quota then return full end
  full = without_room_for(limits, rows, size, added > 0) or within_rate(quota, limits, 'max_texts_s', rows)
  if full then full[5] = facts.tenant or TENANT end
  return full
end
if chunk > added then return {'gap', added} end
local to, below = tonumber(facts.resumed_to), tonumber(facts.resumed_below)
if to and chunk > to then return {'gap', to} end  -- it was added again before, and Redis lost that
if chunk >= (original or (sealed and added) or math.huge) then return {'sealed', original or added} end
if chunk < added then
  local was_counted = redis.call('GETBIT', counted, chunk) == 1
  local digest = redis.call('GETRANGE', KEYS[4], DIGEST_FROM, DIGEST_TO)
  if digest == '' and is_drained(chunk) then
    digest = redis.call('GETRANGE', digests, 16 * chunk, 16 * chunk + 15)
  elseif digest == '' and not was_counted then
    digest = redis.call('GETRANGE', KEYS[3], DIGEST_FROM, DIGEST_TO)
  end
  if digest ~= '' and digest ~= ARGV[3] then return {'differs'} end
  local dropped = to and chunk >= to and not was_counted
  local skipped = digest ~= '' and not dropped and not lost_a_retry(chunk)
  if input == '' and not skipped then return {'wanted'} end
  local full = not skipped and (was_counted or dropped) and no_room()
  if full then return full end
  if to and chunk >= to then  -- the job was stopped: this chunk is added again
    if chunk + 1 >= below then
      redis.call('HDEL', job, 'resumed_to', 'resumed_below', 'resumed_by', 'resumed_records')
    else
      redis.call('HSET', job, 'resumed_to', chunk + 1, 'resumed_by', ARGV[6])
      if dropped then redis.call('HINCRBY', job, 'resumed_records', -rows) end
    end
  end
  if skipped then
    offer()
    return {'skipped', facts.waiting_bytes}
  end
  -- Redis lost this chunk, or freed it when the job was stopped, and the corpus repairs it.
  redis.call('HDEL', job, 'lost_first', 'lost_last')
  if was_counted then
    uncount(chunk, rows)
  elseif not dropped then
    redis.call('HINCRBY', job, 'waiting_bytes', -size_in(input))
  end
  if chunk < tonumber(facts.next) then put_back(chunk, 0) end
else
  if input == '' then return {'wanted'} end
  local full = no_room()
  if full then return full end
  if added == 0 then live(life_ms) end
  redis.call('HSET', job, 'added', added + 1)
  redis.call('HINCRBY', job, 'records', rows)
end
store(size_in(input) - size_of(KEYS[3]) + (chunk < added and 0 or KEPT_CHUNK))
redis.call('SET', KEYS[3], input, 'PX', keep_ms)
local waiting = redis.call('HINCRBY', job, 'waiting_bytes', size_in(input))
progress()
account(limits)
offer()
return {'ok', waiting}
