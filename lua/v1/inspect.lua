-- inspect.lua: reads the owners of a lock, their hold counts, and the time to live. Changes
-- nothing.
--
-- KEYS       name     the hash of the lock
-- ARGV[1]    ticket   echoed first in the reply, to prove to which call the reply belongs
-- ARGV[2...] nothing
--
-- Reply: ticket, then two values for the lock, then its fields:
--   pttl, ''        ms (-1: no expiry, -2: no key); then the field and hold count of each owner
--   pttl, message   the server's refusal: the key is not a lock
--
-- A script rather than a plain command, because only the reply of a script proves to which call it
-- belongs.

local reply = { ARGV[1], redis.call('pttl', KEYS[1]), '' }
local fields = redis.pcall('hgetall', KEYS[1])
if fields.err then
  reply[3] = fields.err
else
  for i, value in ipairs(fields) do
    reply[3 + i] = value
  end
end
return reply
