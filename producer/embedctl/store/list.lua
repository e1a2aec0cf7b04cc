-- Some of a tenant's files or batches, in the order of their ids. The ids of those that are gone leave the set.
-- KEYS: its set. ARGV: the id before the first one if any, REV for the newest first, the most.
-- → ok <the last id; empty if no more follow> <id> <fields and values>...
local kind = KEYS[1]:sub(1, #FILES) == FILES and FILE or BATCH
local is_down, most = ARGV[2] == 'REV', tonumber(ARGV[3])
local range = {is_down and '+' or '-', is_down and '-' or '+', 'BYLEX', 'LIMIT', 0, most}
if ARGV[1] ~= '' then range[1] = '(' .. ARGV[1] end
if is_down then table.insert(range, 4, 'REV') end
local ids = redis.call('ZRANGE', KEYS[1], unpack(range))
local found = {'ok', #ids == most and ids[most] or ''}
for _, id in ipairs(ids) do
  local facts = redis.call('HGETALL', kind .. id)
  if facts[1] then
    found[#found + 1], found[#found + 2] = id, facts
  else
    redis.call('ZREM', KEYS[1], id)
  end
end
return found
