-- Correct what is noted of a tenant's jobs by the jobs themselves: of jobs that are named, and of the next slice of those
-- that are noted. So whatever is wrong there after a crash does not stay.
-- KEYS: quota. ARGV: tenant, slice, job… → ok <1 if that was the last slice, else 0> | none
local quota, tenant = KEYS[1], ARGV[1]
local known = redis.call('HMGET', quota, 'since', 'cursor')
if not known[1] then return {'none'} end
redis.call('HDEL', quota, 'cursor')  -- first: in a full Redis, a script that begins by freeing may go on
local over = {completed = true, completed_with_errors = true, failed = true, cancelled = true}

local function correct(id)
  local job, known = JOB .. id, quota_of(quota, id)
  local facts = redis.call('HMGET', job, 'state', 'tenant', 'limited', 'records', 'done', 'failed', 'waiting_bytes',
    'resumed_records', 'original_chunks')
  if not facts[1] or over[facts[1]] or (facts[2] or TENANT) ~= tenant then return note(quota, id, known) end
  if not facts[3] then redis.call('HSET', job, 'limited', 1) end
  local records, bytes = waiting_of(facts[4], facts[5], facts[6], facts[7], facts[8])
  -- Its producer is gone, and nothing of it waits: it has a place again when it adds.
  local has_begun = (tonumber(facts[4]) or 0) > 0 and not facts[9]
  if records == 0 and has_begun and redis.call('EXISTS', job .. ':producer') == 0 then
    return note(quota, id, known)
  end
  note(quota, id, known, records, bytes)
end

for at = 3, #ARGV do correct(ARGV[at]) end
local found = redis.call('HSCAN', quota, known[2] or 0, 'COUNT', ARGV[2])
for at = 1, #found[2], 2 do
  local id = found[2][at]:match('^job:(.+)$')
  if id then correct(id) end
end
if found[1] == '0' then return {'ok', 1} end
redis.call('HSET', quota, 'cursor', found[1])
return {'ok', 0}
