-- Forget a reference to bytes that are gone from outside of Redis. The chunk then counts as lost, and its corpus repairs it.
-- KEYS[9]: input or result. ARGV: job, the reference. → ok <1 if it was still there, else 0>
if redis.call('GET', KEYS[9]) ~= ARGV[2] then return {'ok', 0} end
redis.call('UNLINK', KEYS[9])
if not ended then look_by(now) end
return {'ok', 1}
