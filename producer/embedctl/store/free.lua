-- Free the results of drained chunks. If Redis came back without the note that a part holds them, they stay.
-- KEYS: job, then results. ARGV: job, then the chunks of these results. → ok
local size = 0
for at = 2, #KEYS do
  if is_drained(ARGV[at]) then
    size = size + size_of(KEYS[at])
    redis.call('UNLINK', KEYS[at])
  end
end
store(-size)
account()
return {'ok'}
