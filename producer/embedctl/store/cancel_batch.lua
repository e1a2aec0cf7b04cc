-- Ask for the end of a batch.
-- KEYS: batch. ARGV: id, tenant.
-- → gone | <status>
local facts = redis.call('HMGET', KEYS[1], 'tenant', 'status', 'runner')
if facts[1] ~= ARGV[2] then return {'gone'} end
if facts[2] ~= 'validating' and facts[2] ~= 'in_progress' then return {facts[2]} end
enter(ARGV[1], 'cancelling')
if not facts[3] then look_at(ARGV[1], ARGV[2], 0) end
return {'cancelling'}
