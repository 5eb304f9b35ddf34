-- renew.lua: restores the lease of each of the named locks that the owner still holds.
--
-- KEYS       name...  the hash of each lock
-- ARGV[1]    ticket   echoed first in the reply, to prove to which call the reply belongs
-- ARGV[2...] two for each name, in the order of KEYS:
--            owner    the field CLIENT:THREAD of the owner
--            lease    ms, a whole number above 0
--
-- Reply: ticket, then two values for each name:
--   1, 0        renewed: the expiry is at least the lease
--   0, 0        the owner does not hold the lock
--   3, message  nothing was changed: the server's refusal for this name
--
-- Idempotent. A refusal for one name does not affect the others. The expiry is never shortened, so
-- a longer lease of the same owner stays.
-- Compared with Redisson 3.8.1 to 4.7.0 (docs/compatibility.md).

local function renew(name, owner, lease)
  local held = redis.pcall('hexists', name, owner)
  if type(held) == 'table' then
    return 3, held.err
  end
  if held == 0 then
    return 0, '0'
  end
  if redis.call('pttl', name) < tonumber(lease) then
    local expires = redis.pcall('pexpire', name, lease)
    if type(expires) == 'table' then
      return 3, expires.err
    end
  end
  return 1, '0'
end

local reply = { ARGV[1] }
for i, name in ipairs(KEYS) do
  local at = 2 * i
  reply[2 * i], reply[2 * i + 1] = renew(name, ARGV[at], ARGV[at + 1])
end
return reply
