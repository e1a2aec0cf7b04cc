-- Take a batch that somebody is to look at. Tenants take turns: the first one is who has had none for longest.
-- ARGV: token, length of the lease in ms, most bytes of the batch's input. Without a token, nothing is taken.
-- → taken <batch> | none
for _, tenant in ipairs(redis.call('ZRANGE', TURNS, 0, 999)) do
  local own = UNFINISHED .. tenant
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', own, '-inf', now, 'LIMIT', 0, 16)) do
    if redis.call('EXISTS', BATCH .. id) == 0 then
      redis.call('ZREM', own, id)
    elseif tonumber(redis.call('HGET', BATCH .. id, 'input_bytes') or 0) <= tonumber(ARGV[3]) then
      if ARGV[1] ~= '' then
        redis.call('HSET', BATCH .. id, 'runner', ARGV[1])
        look_at(id, tenant, now + ARGV[2])
        note_deadline(id)  -- somebody may have deleted the list
        redis.call('ZADD', TURNS, now, tenant)
      end
      return {'taken', id}
    end
  end
  if redis.call('EXISTS', own) == 0 then redis.call('ZREM', TURNS, tenant) end
end
return {'none'}
