-- Append a part to an uncommitted result, only if all bytes before it are stored. So a part that comes twice, or after
-- a lost one, does no harm. KEYS[2]: uncommitted result. ARGV: job, its length so far, part, seconds to keep it.
-- → ok <length>
local length = redis.call('STRLEN', KEYS[2])
if length == tonumber(ARGV[2]) then length = redis.call('APPEND', KEYS[2], ARGV[3]) end
redis.call('EXPIRE', KEYS[2], ARGV[4])
return {'ok', length}
