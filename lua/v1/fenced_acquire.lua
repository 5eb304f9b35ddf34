-- fenced_acquire.lua: acquires one hold on each of the named locks with a fencing token, or reports
-- why it does not.
--
-- KEYS       name, token...  two for each lock: its hash, and the counter of its tokens
-- ARGV[1]    ticket   echoed first in the reply, to prove to which call the reply belongs
-- ARGV[2...] five for each lock, in the order of KEYS:
--            owner    the field CLIENT:THREAD of the owner that acquires
--            lease    ms, a whole number above 0
--            before   the owner's hold count by the caller's record, 0 for none
--            target   the hold count to set, above 0
--            raise    1 for a new token, 0 if the caller knows the token of its tenure
--
-- Reply: ticket, then two values for each lock:
--   1, token    granted: the owner's hold count is `target`; the expiry is at least the lease. The
--               token means nothing if `raise` is 0
--   0, pttl     another owner holds the lock and its key expires in pttl ms (-1: no expiry)
--   2, count    nothing was changed: the owner's count is neither before nor target (0: no field)
--   3, message  no hold was acquired: the server's refusal for this lock
--
-- The hash is moved as acquire.lua moves it, so both kinds of lock share it. The token is raised
-- first: a token that no hold follows leaves a gap, a hold without a token would not be fenced. So
-- does a second run, which changes nothing else. The counter has no expiry. Redisson raises it with
-- each re-entry, too (docs/compatibility.md).

local function raised(token)
  local number = redis.pcall('incr', token)
  if type(number) == 'table' then
    return nil, number.err
  end
  -- Lua's numbers are exact to 2^53 only.
  if math.abs(number) >= 9007199254740992 then
    number = redis.pcall('get', token)
    if type(number) == 'table' then
      return nil, number.err
    end
  end
  return number
end

local function acquire(name, token, owner, lease, before, target, raise)
  local left = redis.call('pttl', name)
  local count = false
  if left ~= -2 then
    count = redis.pcall('hget', name, owner)
    if type(count) == 'table' then
      return 3, count.err
    end
    if not count then
      return 0, left
    end
  end
  if count ~= before and count ~= target and (count or before ~= '0') then
    return 2, count or '0'
  end
  local number = 0
  if raise == '1' then
    local refusal
    number, refusal = raised(token)
    if refusal then
      return 3, refusal
    end
  end
  if not count then
    local set = redis.pcall('hset', name, owner, target)
    if type(set) == 'table' then
      return 3, set.err
    end
  end
  if left < tonumber(lease) then
    local expires = redis.pcall('pexpire', name, lease)
    if type(expires) == 'table' then
      if not count and type(redis.pcall('del', name)) == 'table' then
        redis.pcall('hdel', name, owner)
      end
      return 3, expires.err
    end
  end
  if count and count ~= target then
    local set = redis.pcall('hset', name, owner, target)
    if type(set) == 'table' then
      return 3, set.err
    end
  end
  return 1, number
end

local reply = { ARGV[1] }
for i = 1, #KEYS / 2 do
  local at = 5 * i - 3
  reply[2 * i], reply[2 * i + 1] = acquire(KEYS[2 * i - 1], KEYS[2 * i],
    ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4])
end
return reply
