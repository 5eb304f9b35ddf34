-- inspect.lua: tells who holds a lock, and for how long. Changes nothing.
--
-- KEYS       name     the hash of the lock
-- ARGV[1]    ticket   echoed first in the reply, so that a reply proves whose it is
-- ARGV[2...] nothing
--
-- Reply: ticket, then two values for the lock, then its fields:
--   pttl, ''        in ms (-1: no expiry, -2: no such key); then field and count of each owner
--   pttl, message   the server's refusal: the key is no lock
--
-- A script and not a plain command, because only a script's reply proves whose it is.

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
