-- Note that a durable part holds the results of some chunks. The caller unlinks them after that.
-- KEYS[2]: drainer. ARGV: job, token, lease, part, its facts, bytes of the results, first and last chunk of a range,
-- digests of that range, then chunks outside of it, which hold retried or repaired records, or are what was done of a
-- stopped job. Without a range, the digests are those of the first chunks outside of it.
-- → ok | not_owner | already <facts of the part> | missing <chunk> | full <limit> <its value> <what the tenant has> <tenant>
local known = redis.call('HGET', parts, ARGV[4])
if known == ARGV[5] then return {'ok'} end  -- noted before; the answer was lost
local owner = redis.call('GET', KEYS[2])
if not owner or owner:match('^%S+') ~= ARGV[2] then return {'not_owner'} end
redis.call('PEXPIRE', KEYS[2], ARGV[3])  -- first, as in `drainer`: this needs no memory
if known then return {'already', known} end
local first, last = tonumber(ARGV[7]), tonumber(ARGV[8])
local chunks = {}
for chunk = first, last do chunks[#chunks + 1] = chunk end
for at = 10, #ARGV do chunks[#chunks + 1] = tonumber(ARGV[at]) end
for _, chunk in ipairs(chunks) do
  if redis.call('GETBIT', counted, chunk) == 0 or is_drained(chunk) then return {'missing', chunk} end
end
-- Facts of some size are refused where the tenant keeps more than it may; all but them make room.
local full = kept and #ARGV[5] > SMALL_FACTS
  and without_keeping(kept, facts.keeps, facts.tenant or TENANT, #ARGV[5], 1)
if full then return full end
for _, chunk in ipairs(chunks) do redis.call('SETBIT', drained, chunk, 1) end
if last >= first then
  redis.call('SETRANGE', digests, 16 * first, ARGV[9])
  redis.call('HSET', job, 'drained_next', last + 1)
else
  for at = 1, #ARGV[9] / 16 do
    redis.call('SETRANGE', digests, 16 * tonumber(ARGV[9 + at]), ARGV[9]:sub(16 * at - 15, 16 * at))
  end
end
redis.call('HSET', parts, ARGV[4], ARGV[5])
store(#ARGV[5])
redis.call('HINCRBY', job, last >= first and 'parts' or 'retry_parts', 1)
local left = redis.call('HINCRBY', job, 'result_bytes', 0 - tonumber(ARGV[6]))
-- The size of a result that Redis lost is unknown.
local all = redis.call('HINCRBY', job, 'drained_chunks', #chunks) >= tonumber(facts.chunks_done)
if left < 0 or all then redis.call('HSET', job, 'result_bytes', 0) end
local lives_ms = redis.call('PTTL', job) + math.floor(ttl_ms * (CHUNK_TTL_FACTOR - 1))
for _, key in ipairs({drained, parts, digests}) do
  if redis.call('PTTL', key) < lives_ms then redis.call('PEXPIRE', key, lives_ms) end
end
if not ended then look_by(now + LOOK_AFTER_MS) end
account()
offer()  -- there is room for results
return {'ok'}
