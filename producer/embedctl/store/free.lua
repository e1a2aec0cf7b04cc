-- Free the results of drained chunks. If Redis came back without the note that a part holds them, they stay.
-- KEYS: drained, then results. ARGV: the chunks of these results. → ok
for at, chunk in ipairs(ARGV) do
  if redis.call('GETBIT', KEYS[1], chunk) == 1 then redis.call('UNLINK', KEYS[at + 1]) end
end
return {'ok'}
