package peer;

import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import org.redisson.api.RBucket;
import org.redisson.api.RLock;
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
        return ops;
    }

    static RLock lockOf(Client client, Command command) {
        return client.redisson.getLock(command.text("name"));
    }

    static Object lock(Client client, Command command) {
        RLock lock = lockOf(client, command);
        if (command.has("leaseMs")) {
            lock.lock(command.number("leaseMs"), TimeUnit.MILLISECONDS);
        } else {
            lock.lock();
        }
        return null;
    }

    static Object tryLock(Client client, Command command) throws InterruptedException {
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
    static Object increment(Client client, Command command) {
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
}
