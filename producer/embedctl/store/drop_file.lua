-- Remove the record of a file. KEYS: file, its tenant's files. ARGV: id, size in bytes. → ok
if redis.call('UNLINK', KEYS[1]) == 1 then keep_bytes(KEYS[2], -ARGV[2]) end
redis.call('ZREM', KEYS[2], ARGV[1])
return {'ok'}
