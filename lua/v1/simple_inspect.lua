-- simple_inspect.lua: reads the owner of a simple lock and the time to live. Changes nothing.
--
-- KEYS       name     the string of the lock
-- ARGV[1]    ticket   echoed first in the reply, to prove to which call the reply belongs
-- ARGV[2...] nothing
--
-- Reply: ticket, then two values for the lock, then its owner:
--   pttl, ''        ms (-1: no expiry, -2: no key); then the value and 1, if there is a key
--   pttl, message   the server's refusal: the key is not a simple lock

local reply = { ARGV[1], redis.call('pttl', KEYS[1]), '' }
local value = redis.pcall('get', KEYS[1])
if type(value) == 'table' then
  reply[3] = value.err
elseif value then
  reply[4], reply[5] = value, 1
end
return reply
