-- count.lua: reads the owner's hold count on each of the named locks. Changes nothing.
--
-- KEYS       name...  the hash of each lock
-- ARGV[1]    ticket   echoed first in the reply, to prove to which call the reply belongs
-- ARGV[2...] one for each name, in the order of KEYS:
--            owner    the field CLIENT:THREAD of the owner
--
-- Reply: ticket, then two values for each name:
--   1, count    the owner's hold count (0: no field)
--   3, message  the server's refusal for this name
--
-- Called before the first acquire of an owner that may hold the lock without a record in this
-- process (an adopted client id, an owner made from a thread id). The acquire then passes the
-- server's count as `before`.

local reply = { ARGV[1] }
for i, name in ipairs(KEYS) do
  local count = redis.pcall('hget', name, ARGV[i + 1])
  if type(count) == 'table' then
    reply[2 * i], reply[2 * i + 1] = 3, count.err
  else
    reply[2 * i], reply[2 * i + 1] = 1, count or '0'
  end
end
return reply
