-- Lease a chunk to a worker. The answer holds the chunk's text and, if the chunk is suspect, the rows given up.
-- KEYS[9..10]: input, result. ARGV: job, chunk, token, instance, model fingerprint, lease, delay after a mismatch; of a
-- worker that does not know the job: its precision and its model.
-- → ok <attempt> <input> [<rows, comma-separated, or nil> <doubts of earlier owners, or nil>] | done | busy
--   | mismatch <pinned fingerprint> | lost | other (the job has another precision or model)
local chunk, token, instance, fingerprint = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
if ended or redis.call('EXISTS', KEYS[10]) == 1 then return {'done'} end
if redis.call('GETBIT', counted, chunk) == 1 then  -- Redis lost only the result; the remaining input is not the whole text
  forget(chunk)
  return {is_drained(chunk) and 'done' or 'lost'}
end
if ARGV[8] then
  local of = redis.call('HMGET', job, 'precision', 'model')
  if of[1] ~= ARGV[8] or of[2] ~= ARGV[9] then return {'other'} end
end
local owner = redis.call('HGET', owners, chunk)
-- If the owner has this claim's token, the answer was lost, and the client asks again. A lapsed lease is busy too: only
-- the reaper decides what happened to its owner.
if owner and owner:match('^%S+') ~= token then return {'busy'} end
local pinned = redis.call('HGET', job, 'model_fingerprint')
if pinned and pinned ~= fingerprint then
  redis.call('HSET', job, 'mismatch', instance .. ' ' .. fingerprint)
  schedule(chunk, ARGV[7])
  return {'mismatch', pinned}
end
local input = redis.call('GET', KEYS[9])
if not input then
  forget(chunk)  -- so that the audit sees the hole
  look_by(now)
  return {'lost'}
end
if not pinned then redis.call('HSET', job, 'model_fingerprint', fingerprint, 'pinned_by', instance) end
redis.call('HSET', owners, chunk, token .. ' ' .. instance)
schedule(chunk, ARGV[6])
redis.call('HDEL', reissues, chunk, chunk .. ':sent')
redis.call('HINCRBY', job, 'claims', 1)
redis.call('HSETNX', job, 'started_ms', now)
local attempt = redis.call('HINCRBY', attempts, chunk, 1)
if state == 'queued' then enter('running') end
progress()
if attempt == 1 then return {'ok', attempt, input} end
local known = redis.call('HMGET', attempts, chunk .. ':deaths', chunk .. ':doubts')
if not known[1] and not known[2] then return {'ok', attempt, input} end
return {'ok', attempt, input, known[1] and cjson.decode(known[1]).rows, known[2]}
