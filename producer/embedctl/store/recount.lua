-- Correct what is noted as kept of a tenant's jobs by the jobs themselves: of those that are named, and of the next slice of
-- those that are noted. So what has expired, or was removed, does not count for long.
-- KEYS: kept. ARGV: tenant, slice, job… → ok <1 if that was the last slice, else 0>
local over = {completed = true, completed_with_errors = true, failed = true, cancelled = true}

local function correct(id)
  local facts = redis.call('HMGET', JOB .. id, 'state', 'tenant', 'keeps', 'kept_bytes', 'records', 'done', 'failed',
    'waiting_bytes', 'resumed_records', 'sealed')
  if not facts[3] or (facts[2] or TENANT) ~= ARGV[1] then return note_kept(KEYS[1], id, 0) end
  local records, bytes = waiting_of(unpack(facts, 5, 9))
  if over[facts[1]] then records, bytes = 0, 0 end
  note_kept(KEYS[1], id, kept_of(facts[3], facts[4], records, bytes, over[facts[1]] or facts[10] == '1'))
end

local cursor = redis.call('HGET', KEYS[1], 'cursor') or 0
redis.call('HDEL', KEYS[1], 'cursor')  -- first: in a full Redis, a script that begins by freeing may go on
for at = 3, #ARGV do correct(ARGV[at]) end
local found = redis.call('HSCAN', KEYS[1], cursor, 'COUNT', ARGV[2])
for at = 1, #found[2], 2 do
  if found[2][at]:match('^%d') then correct(found[2][at]) end
end
if found[1] == '0' then
  -- Nobody has noted anything meanwhile, so the sum can be made anew.
  local kept, sum = cursor == 0 and redis.call('HGETALL', KEYS[1]) or {}, 0
  for at = 1, #kept, 2 do
    if kept[at]:match('^%d') then sum = sum + kept[at + 1] end
  end
  if #kept > 0 then redis.call('HSET', KEYS[1], 'sum', string.format('%.0f', sum)) end
  return {'ok', 1}
end
redis.call('HSET', KEYS[1], 'cursor', found[1])
return {'ok', 0}
