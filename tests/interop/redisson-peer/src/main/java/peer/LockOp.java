package peer;

import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import org.redisson.api.RBucket;
import org.redisson.api.RList;
import org.redisson.api.RLock;
import org.redisson.api.RedissonClient;
import org.redisson.client.codec.StringCodec;

/** The commands that run on a named thread, by the name of their op. */
interface LockOp {
    Object run(Client client, Command command) throws Exception;

    Map<String, LockOp> BY_NAME = all();

    static Map<String, LockOp> all() {
        Map<String, LockOp> ops = new HashMap<>();
        ops.put("lock", LockOp::lock);
        ops.put("tryLock", LockOp::tryLock);
        ops.put("unlock", (client, command) -> {
            lockOf(client, command).unlock();
            return null;
        });
        ops.put("forceUnlock", (client, command) -> lockOf(client, command).forceUnlock());
        ops.put("isLocked", (client, command) -> lockOf(client, command).isLocked());
        ops.put("isHeldByThread", LockOp::isHeldByThread);
        ops.put("isHeldByCurrentThread",
                (client, command) -> lockOf(client, command).isHeldByCurrentThread());
        ops.put("getHoldCount", (client, command) -> lockOf(client, command).getHoldCount());
        ops.put("remainTimeToLive", (client, command) -> lockOf(client, command).remainTimeToLive());
        ops.put("increment", LockOp::increment);
        ops.put("lockAndGetToken", LockOp::lockAndGetToken);
        ops.put("tryLockAndGetToken", (client, command) -> tokenOp("tryLockAndGetToken",
                new Class<?>[] {long.class, long.class, TimeUnit.class}, client, command,
                command.number("waitMs"), -1L, TimeUnit.MILLISECONDS));
        ops.put("getToken",
                (client, command) -> tokenOp("getToken", new Class<?>[0], client, command));
        ops.put("appendTokens", LockOp::appendTokens);
        return ops;
    }

    /** The lock of the command's "kind": a reentrant lock, or "fenced" (3.19.0 and later). */
    static RLock lockOf(Client client, Command command) throws ReflectiveOperationException {
        String name = command.text("name");
        if (command.text("kind", "reentrant").equals("fenced")) {
            return (RLock) RedissonClient.class.getMethod("getFencedLock", String.class)
                    .invoke(client.redisson, name);
        }
        return client.redisson.getLock(name);
    }

    static Object lock(Client client, Command command) throws ReflectiveOperationException {
        RLock lock = lockOf(client, command);
        if (command.has("leaseMs")) {
            lock.lock(command.number("leaseMs"), TimeUnit.MILLISECONDS);
        } else {
            lock.lock();
        }
        return null;
    }

    static Object tryLock(Client client, Command command) throws Exception {
        RLock lock = lockOf(client, command);
        long wait = command.has("waitMs") ? command.number("waitMs") : 0;
        if (command.has("leaseMs")) {
            return lock.tryLock(wait, command.number("leaseMs"), TimeUnit.MILLISECONDS);
        }
        // No wait time given is a call of its own, not a wait of zero.
        return command.has("waitMs") ? lock.tryLock(wait, TimeUnit.MILLISECONDS) : lock.tryLock();
    }

    static Object isHeldByThread(Client client, Command command)
            throws ReflectiveOperationException {
        long thread = command.has("threadId")
                ? command.number("threadId")
                : Thread.currentThread().getId();
        RLock lock = lockOf(client, command);
        try {
            return RLock.class.getMethod("isHeldByThread", long.class).invoke(lock, thread);
        } catch (NoSuchMethodException e) {
            // 3.8.1 has only isHeldByCurrentThread(): make the same query for any thread.
            return client.redisson.getMap(command.text("name"), StringCodec.INSTANCE)
                    .containsKey(client.id + ":" + thread);
        }
    }

    /** Repeats n times: lock, read the counter, write it plus one, unlock. */
    static Object increment(Client client, Command command) throws ReflectiveOperationException {
        RLock lock = lockOf(client, command);
        RBucket<String> counter = client.redisson.getBucket(command.text("key"), StringCodec.INSTANCE);
        long last = 0;
        for (long i = command.number("n"); i > 0; i--) {
            lock.lock();
            try {
                String text = counter.get();
                last = (text == null ? 0 : Long.parseLong(text)) + 1;
                counter.set(Long.toString(last));
            } finally {
                lock.unlock();
            }
        }
        return last;
    }

    /** A method of RFencedLock, which older versions do not have. */
    static Object tokenOp(String method, Class<?>[] types, Client client, Command command,
            Object... arguments) throws ReflectiveOperationException {
        RLock lock = lockOf(client, command);
        return Class.forName("org.redisson.api.RFencedLock").getMethod(method, types)
                .invoke(lock, arguments);
    }

    static Object lockAndGetToken(Client client, Command command)
            throws ReflectiveOperationException {
        if (command.has("leaseMs")) {
            return tokenOp("lockAndGetToken", new Class<?>[] {long.class, TimeUnit.class}, client,
                    command, command.number("leaseMs"), TimeUnit.MILLISECONDS);
        }
        return tokenOp("lockAndGetToken", new Class<?>[0], client, command);
    }

    /** Repeats n times: lock, append the token to a list, unlock. Returns the last token. */
    static Object appendTokens(Client client, Command command)
            throws ReflectiveOperationException {
        RLock lock = lockOf(client, command);
        RList<String> list = client.redisson.getList(command.text("key"), StringCodec.INSTANCE);
        Object token = null;
        for (long i = command.number("n"); i > 0; i--) {
            token = lockAndGetToken(client, command);
            try {
                list.add(token.toString());
            } finally {
                lock.unlock();
            }
        }
        return token;
    }
}
