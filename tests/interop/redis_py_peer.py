"""A process with redis-py's Lock, for the scenarios of redis_py.rs.

It reads one JSON command a line, runs it, and prints one JSON line: {"value": ...}, or {"error":
CLASS}. Its only argument is the server's URL.
"""

import json
import sys
import time

import redis

client = redis.Redis.from_url(sys.argv[1])
locks = {}


def acquire(command):
    """Makes a lock object of its own, and acquires it. Times are in seconds."""
    name = command["name"]
    lock = client.lock(name, timeout=command.get("timeout"))
    acquired = lock.acquire(blocking_timeout=command.get("wait"))
    if acquired:
        locks[name] = lock
    return acquired


def increment(command):
    """Repeats n times: acquire, read the counter, write it plus one, release."""
    key = command["key"]
    for _ in range(command["n"]):
        with client.lock(command["name"], timeout=60, sleep=0.005):
            count = int(client.get(key) or 0)
            time.sleep(0.0005)
            client.set(key, count + 1)


commands = {
    "version": lambda command: redis.__version__,
    "acquire": acquire,
    "release": lambda command: locks[command["name"]].release(),
    "extend": lambda command: locks[command["name"]].extend(command["by"]),
    "owned": lambda command: locks[command["name"]].owned(),
    "token": lambda command: locks[command["name"]].local.token.decode(),
    "locked": lambda command: client.lock(command["name"]).locked(),
    "increment": increment,
}

for line in sys.stdin:
    command = json.loads(line)
    try:
        reply = {"value": commands[command["op"]](command)}
    except Exception as error:  # Each error is an answer.
        reply = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(reply), flush=True)
