-- Functions of `add` for a job that lost results in Redis.
local input_of, result_of, pointer_of = job .. ':in:', job .. ':out:', job .. ':retry:'

-- The number of records that a chunk's input holds, or held before it was gone from outside of Redis.
local function rows_left(chunk)
  local rows = rows_of(input_of .. chunk)
  return rows > 0 and rows or tonumber(redis.call('HGET', attempts, chunk .. ':gone') or 0)
end

-- Whether the text of a chunk's failed records is gone, or a result of the chunks that retry them.
local function lost_a_retry(chunk)
  if outside and redis.call('HEXISTS', attempts, chunk .. ':gone') == 1 then return true end
  local later = redis.call('GET', pointer_of .. chunk)
  if not later then return false end
  local gone = redis.call('EXISTS', result_of .. later) == 0 and redis.call('GETBIT', counted, later) == 1
    and not is_drained(later)
  return gone or lost_a_retry(later)
end

-- Void a chunk that retries failed records. Returns how many of its records are counted as failed.
local function void(chunk)
  local input, was_counted = input_of .. chunk, redis.call('GETBIT', counted, chunk) == 1
  local failed = was_counted and rows_left(chunk) or 0
  if not was_counted then
    redis.call('HINCRBY', job, 'waiting_bytes', 0 - size_of(input))
    redis.call('HINCRBY', job, 'chunks_done', 1)
    redis.call('SETBIT', counted, chunk, 1)
  end
  store(0 - size_of(input) - size_of(result_of .. chunk))
  redis.call('UNLINK', input)
  redis.call('SET', result_of .. chunk, 'void', 'PX', keep_ms)
  forget(chunk)
  redis.call('HDEL', attempts, chunk .. ':gone')
  return failed
end

-- Uncount the records of a chunk whose result Redis lost, with those that were retried since. In a series of retries,
-- the last chunk holds the records that have no vector.
local function uncount(chunk, rows)
  local last, failed = chunk, rows_left(chunk)
  local without = failed
  local later = redis.call('GET', pointer_of .. chunk)
  while later do
    redis.call('UNLINK', pointer_of .. last)
    last, without = later, rows_left(later)
    failed = void(last)
    later = redis.call('GET', pointer_of .. last)
  end
  redis.call('HDEL', attempts, chunk .. ':gone')
  store(0 - size_of(result_of .. chunk))
  redis.call('UNLINK', result_of .. chunk)  -- if the lost result is a retry's
  redis.call('SETBIT', counted, chunk, 0)
  if is_drained(chunk) then  -- it is drained once more, and readers of its parts take the later records
    redis.call('SETBIT', drained, chunk, 0)
    redis.call('HINCRBY', job, 'drained_chunks', -1)
  end
  redis.call('HINCRBY', job, 'chunks_done', -1)
  redis.call('HINCRBY', job, 'done', without - rows)
  redis.call('HINCRBY', job, 'failed', 0 - failed)  -- not -0, which Redis does not take as an integer
  reopen('running')
end
