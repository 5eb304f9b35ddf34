-- simple_renew.lua: restores the lease of each of the named simple locks that the owner still
-- holds.
--
-- KEYS       name...  the string of each lock
-- ARGV[1]    ticket   echoed first in the reply, to prove to which call the reply belongs
-- ARGV[2...] two for each name, in the order of KEYS:
--            owner    the value by which the owner is known
--            lease    ms, a whole number above 0
--
-- Reply: ticket, then two values for each name:
--   1, 0        renewed: the expiry is at least the lease
--   0, 0        the owner does not hold the lock
--   3, message  nothing was changed: the server's refusal for this name
--
-- Idempotent. A refusal for one name does not affect the others. The expiry is never shortened.

local function renew(name, owner, lease)
  local value = redis.pcall('get', name)
  if type(value) == 'table' then
    return 3, value.err
  end
  if value ~= owner then
    return 0, 0
  end
  if redis.call('pttl', name) < tonumber(lease) then
    local expires = redis.pcall('pexpire', name, lease)
    if type(expires) == 'table' then
      return 3, expires.err
    end
  end
  return 1, 0
end

local reply = { ARGV[1] }
for i, name in ipairs(KEYS) do
  reply[2 * i], reply[2 * i + 1] = renew(name, ARGV[2 * i], ARGV[2 * i + 1])
end
return reply
