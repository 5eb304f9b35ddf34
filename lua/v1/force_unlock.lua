-- force_unlock.lua: frees each of the locks named, whoever holds it, and wakes its waiters.
--
-- KEYS       name...  the hash of each lock
-- ARGV[1]    ticket   echoed first in the reply, so that a reply proves whose it is
-- ARGV[2...] one for each name, in the order of KEYS:
--            channel  where the lock's waiters listen (an argument: it is not a key)
--
-- Reply: ticket, then two values for each name:
--   1, 0        the lock was held and is free now; `0` was published
--   0, 0        there was no such lock
--   3, message  nothing was changed: the server's refusal for this name
--
-- Idempotent. A key of another type is refused and stays (Redisson would delete it).
-- Checked side by side with Redisson 3.8.1 to 4.7.0 (docs/compatibility.md).

local function force_unlock(name, channel)
  local hash = redis.pcall('hexists', name, '')
  if type(hash) == 'table' then
    return 3, hash.err
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
  reply[2 * i], reply[2 * i + 1] = force_unlock(name, ARGV[i + 1])
end
return reply
