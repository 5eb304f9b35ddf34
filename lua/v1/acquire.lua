-- acquire.lua: acquires one hold on each of the named locks, or reports why it does not.
--
-- KEYS       name...  the hash of each lock
-- ARGV[1]    ticket   echoed first in the reply, to prove to which call the reply belongs
-- ARGV[2...] four for each name, in the order of KEYS:
--            owner    the field CLIENT:THREAD of the owner that acquires
--            lease    ms, a whole number above 0
--            before   the owner's hold count by the caller's record, 0 for none
--            target   the hold count to set, above 0
--
-- Reply: ticket, then two values for each name:
--   1, target   granted: the owner's hold count is `target`; the expiry is at least the lease
--   0, pttl     another owner holds the lock and its key expires in pttl ms (-1: no expiry)
--   2, count    nothing was changed: the owner's count is neither before nor target (0: no field)
--   3, message  no hold was acquired: the server's refusal for this name
--
-- Idempotent: the script writes `target` only over `before`, so a second run finds `target` and
-- changes nothing. The same run sets the field and the expiry (a user who may not set the expiry
-- gets no lock). The expiry is never shortened. Compared with Redisson 3.8.1 to 4.7.0
-- (docs/compatibility.md).

local function acquire(name, owner, lease, before, target)
  local left = redis.call('pttl', name)
  if left == -2 then
    if before ~= '0' then
      return 2, '0'
    end
    local set = redis.pcall('hset', name, owner, target)
    if type(set) == 'table' then
      return 3, set.err
    end
    local expires = redis.pcall('pexpire', name, lease)
    if type(expires) == 'table' then
      if type(redis.pcall('del', name)) == 'table' then
        redis.pcall('hdel', name, owner)
      end
      return 3, expires.err
    end
    return 1, target
  end
  local count = redis.pcall('hget', name, owner)
  if type(count) == 'table' then
    return 3, count.err
  end
  if not count then
    return 0, left
  end
  if count ~= before and count ~= target then
    return 2, count
  end
  if left < tonumber(lease) then
    local expires = redis.pcall('pexpire', name, lease)
    if type(expires) == 'table' then
      return 3, expires.err
    end
  end
  if count == before then
    local set = redis.pcall('hset', name, owner, target)
    if type(set) == 'table' then
      return 3, set.err
    end
  end
  return 1, target
end

local reply = { ARGV[1] }
for i, name in ipairs(KEYS) do
  local at = 4 * i - 2
  reply[2 * i], reply[2 * i + 1] = acquire(name, ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3])
end
return reply
