-- simple_count.lua: reads whether the owner holds each of the named simple locks. Changes nothing.
--
-- KEYS       name...  the string of each lock
-- ARGV[1]    ticket   echoed first in the reply, to prove to which call the reply belongs
-- ARGV[2...] one for each name, in the order of KEYS:
--            owner    the value by which the owner is known
--
-- Reply: ticket, then two values for each name:
--   1, count    1 if the owner holds the lock, 0 if it does not
--   3, message  the server's refusal for this name

local reply = { ARGV[1] }
for i, name in ipairs(KEYS) do
  local value = redis.pcall('get', name)
  if type(value) == 'table' then
    reply[2 * i], reply[2 * i + 1] = 3, value.err
  else
    reply[2 * i], reply[2 * i + 1] = 1, value == ARGV[i + 1] and 1 or 0
  end
end
return reply
