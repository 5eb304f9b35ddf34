-- force_unlock.lua: frees each of the named locks if the given owner holds it, and wakes its
-- waiters.
--
-- KEYS       name...  the hash of each lock
-- ARGV[1]    ticket   echoed first in the reply, to prove to which call the reply belongs
-- ARGV[2...] two for each name, in the order of KEYS:
--            owner    the field CLIENT:THREAD of the owner to be removed; empty: any owner
--            channel  the release channel (an argument, since a channel is not a key)
--
-- Reply: ticket, then two values for each name:
--   1, 0        the owner held the lock, which is free now; `0` was published
--   0, 0        nothing was changed: that owner does not hold it
--   3, message  nothing was changed: the server's refusal for this name
--
-- Idempotent with an owner: a second run does not free another owner's lock. Without an owner it is
-- not idempotent, and the client sends it once. A key of another type is refused and stays
-- (Redisson would delete it). Compared with Redisson 3.8.1 to 4.7.0 (docs/compatibility.md).

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
