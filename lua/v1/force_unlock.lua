-- force_unlock.lua: frees each of the locks named if that owner holds it, and wakes its waiters.
--
-- KEYS       name...  the hash of each lock
-- ARGV[1]    ticket   echoed first in the reply, so that a reply proves whose it is
-- ARGV[2...] two for each name, in the order of KEYS:
--            owner    the field CLIENT:THREAD that was seen to hold it; empty: any owner
--            channel  where the lock's waiters listen (an argument: it is not a key)
--
-- Reply: ticket, then two values for each name:
--   1, 0        the lock was held so and is free now; `0` was published
--   0, 0        nothing was changed: that owner does not hold it
--   3, message  nothing was changed: the server's refusal for this name
--
-- Idempotent with an owner: a second run takes no other owner's lock. Without one it is not, and is
-- sent once. A key of another type is refused and stays (Redisson would delete it). Checked side by
-- side with Redisson 3.8.1 to 4.7.0 (docs/compatibility.md).

local function force_unlock(name, owner, channel)
  local held = redis.pcall('hexists', name, owner)
  if type(held) == 'table' then
    return 3, held.err
  end
  if held == 0 and owner ~= '' then
    return 0, '0'
  end
  local deleted = redis.pcall('del', name)
  if type(deleted) == 'table' then
    return 3, deleted.err
  end
  if deleted == 0 then
    return 0, '0'
  end
  redis.pcall('publish', channel, '0')
  return 1, '0'
end

local reply = { ARGV[1] }
for i, name in ipairs(KEYS) do
  reply[2 * i], reply[2 * i + 1] = force_unlock(name, ARGV[2 * i], ARGV[2 * i + 1])
end
return reply
