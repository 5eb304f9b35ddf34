-- simple_release.lua: frees each of the named simple locks if the given owner holds it, and wakes
-- its waiters.
--
-- KEYS       name...  the string of each lock
-- ARGV[1]    ticket   echoed first in the reply, to prove to which call the reply belongs
-- ARGV[2...] two for each name, in the order of KEYS:
--            owner    the value by which the owner is known; empty: any owner
--            channel  the release channel (an argument, since a channel is not a key)
--
-- Reply: ticket, then two values for each name:
--   1, 0        the lock is free: the key is deleted, `0` was published
--   2, 0        nothing was changed: that owner does not hold it
--   3, message  the server's refusal for this name; the lock is not free
--
-- Idempotent with an owner: an owner acquires a lock once, so a second run does not free another
-- tenure. Without an owner it is not, and the client sends it once. The lock is freed even if the
-- server refuses the publish (ACL).

local function release(name, owner, channel)
  local value = redis.pcall('get', name)
  if type(value) == 'table' then
    return 3, value.err
  end
  if not value or (owner ~= '' and value ~= owner) then
    return 2, 0
  end
  local deleted = redis.pcall('del', name)
  if type(deleted) == 'table' then
    return 3, deleted.err
  end
  redis.pcall('publish', channel, '0')
  return 1, 0
end

local reply = { ARGV[1] }
for i, name in ipairs(KEYS) do
  reply[2 * i], reply[2 * i + 1] = release(name, ARGV[2 * i], ARGV[2 * i + 1])
end
return reply
