-- simple_acquire.lua: acquires each of the named simple locks, or reports why it does not.
--
-- KEYS       name...  the string of each lock
-- ARGV[1]    ticket   echoed first in the reply, to prove to which call the reply belongs
-- ARGV[2...] two for each name, in the order of KEYS:
--            owner    CLIENT:THREAD, the value by which the owner is known
--            lease    ms, a whole number above 0
--
-- Reply: ticket, then two values for each name:
--   1, 1        granted: the value is the owner; the expiry is at least the lease
--   0, pttl     an owner of this library holds the lock and its key expires in pttl ms (-1: no
--               expiry)
--   4, pttl     the same for another program, which publishes no release
--   3, message  the lock was not acquired: the server's refusal for this name
--
-- Idempotent: each owner acquires a lock once, so a second run finds its own value. The value and
-- its expiry are set in one step (https://redis.io/docs/latest/commands/set/). The script reads
-- first: a server without memory refuses SET also where the key exists and NX would set nothing.

local function acquire(name, owner, lease)
  local value = redis.pcall('get', name)
  if type(value) == 'table' then
    return 3, value.err
  end
  if not value then
    local set = redis.pcall('set', name, owner, 'PX', lease)
    if set.err then
      return 3, set.err
    end
    return 1, 1
  end
  local left = redis.call('pttl', name)
  if value == owner then
    if left < tonumber(lease) then
      local expires = redis.pcall('pexpire', name, lease)
      if type(expires) == 'table' then
        return 3, expires.err
      end
    end
    return 1, 1
  end
  if string.match(value, '^%x+%-%x+%-%x+%-%x+%-%x+:%d+$') then
    return 0, left
  end
  return 4, left
end

local reply = { ARGV[1] }
for i, name in ipairs(KEYS) do
  reply[2 * i], reply[2 * i + 1] = acquire(name, ARGV[2 * i], ARGV[2 * i + 1])
end
return reply
