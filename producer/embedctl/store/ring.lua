-- Ring for the queues of a worker that have chunks which are ready, and no bell. A bell that was lost costs the time until
-- the next call. ARGV: precision, then queues, each with a fingerprint. → ok
for at = 2, #ARGV, 2 do
  local queue, kinds = ARGV[at], {[kind_of(ARGV[1], ARGV[at + 1])] = true, [kind_of(ARGV[1], '*')] = true}
  -- Redis may have lost the names of this worker's lists, and nobody else may come by what is in them.
  for lane in pairs(KNOWN_LANES) do
    for kind in pairs(kinds) do
      for _, of in ipairs({kind, APART .. kind}) do
        local place = {lane = lane, queue = queue, kind = of}
        if redis.call('EXISTS', flows_of(place)) == 1 then name_lists(place) end
      end
    end
  end
  if redis.pcall('LLEN', queue) == 0 and is_listed(lists_in(queue, has_quarantine(queue) and 'usual' or 'both', kinds)) then
    ring(queue, 1)
  end
end
-- What a killed worker had heard is here for good if no worker comes back, which would put it into the queue again.
for _, key in ipairs(UNACKED) do keep(key) end
return {'ok'}
