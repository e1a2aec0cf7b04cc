-- Take, renew or give up the right to drain a job. The job is then one that is drained.
-- KEYS[2]: drainer. ARGV: job, token, token and owner in words, lease (0 gives the right up), most bytes of results in
-- Redis, place of the parts or '', token of an owner that is known to have died or ''.
-- → ok <first chunk not drained> <parts> <parts of retried records> <place> | held <owner>
-- First a write that needs no memory: a full Redis then lets the script go on, and only a drain makes room in it.
redis.call('PEXPIRE', job, redis.call('PTTL', job))
local taken, owner = take(KEYS[2], ARGV[2], ARGV[4], ARGV[3], ARGV[7])
if not taken then return {'held', owner} end
redis.call('HSET', job, 'results_high_water', ARGV[5])
if ARGV[6] ~= '' then redis.call('HSET', job, 'drain_to', ARGV[6]) end
local facts = redis.call('HMGET', job, 'drained_next', 'parts', 'retry_parts', 'drain_to')
return {'ok', tonumber(facts[1] or 0), tonumber(facts[2] or 0), tonumber(facts[3] or 0), facts[4] or ''}
