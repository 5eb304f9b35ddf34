-- release.lua: lowers the owner's hold count on each of the named locks; a count of 0 frees the
-- lock.
--
-- KEYS       name...  the hash of each lock
-- ARGV[1]    ticket   echoed first in the reply, to prove to which call the reply belongs
-- ARGV[2...] four for each name, in the order of KEYS:
--            owner    the field CLIENT:THREAD of the owner that releases
--            channel  the release channel (an argument, since a channel is not a key)
--            lease    what the remaining holds are entitled to in ms; 0 leaves the expiry as it is
--            leave    the hold count to set, 0 to free the lock
--
-- Reply: ticket, then two values for each name:
--   1, 0        the lock is free: the key is deleted, `0` was published
--   0, leave    the owner's hold count is `leave`; the expiry is the lease
--   2, count    nothing was changed: the owner's count is below `leave` already (0: no field, so
--               it is not the owner)
--   3, message  the server's refusal for this name; the lock is not free
--
-- Idempotent: the script sets the count to `leave`, so a second run changes nothing (it replies
-- 2, 0 where the first run freed the lock). The lock is freed even if the server refuses the
-- publish (ACL). Compared with Redisson 3.8.1 to 4.7.0 (docs/compatibility.md).

local function release(name, owner, channel, lease, leave)
  local count = redis.pcall('hget', name, owner)
  if type(count) == 'table' then
    return 3, count.err
  end
  if not count then
    return 2, '0'
  end
  if leave == '0' then
    local deleted = redis.pcall('del', name)
    if type(deleted) == 'table' then
      return 3, deleted.err
    end
    redis.pcall('publish', channel, '0')
    return 1, '0'
  end
  if count ~= leave then
    if not string.match(count, '^%d+$') then
      return 3, 'ERR the hold count is not a number'
    end
    -- As text: Lua's numbers are exact to 2^53 only.
    if #count < #leave or (#count == #leave and count < leave) then
      return 2, count
    end
  end
  -- Before the count: a server without memory refuses a script's first write if it may grow, and
  -- later ones no more.
  if lease ~= '0' then
    local expires = redis.pcall('pexpire', name, lease)
    if type(expires) == 'table' then
      return 3, expires.err
    end
  end
  if count ~= leave then
    local set = redis.pcall('hset', name, owner, leave)
    if type(set) == 'table' then
      return 3, set.err
    end
  end
  return 0, leave
end

local reply = { ARGV[1] }
for i, name in ipairs(KEYS) do
  local at = 4 * i - 2
  reply[2 * i], reply[2 * i + 1] = release(name, ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3])
end
return reply
