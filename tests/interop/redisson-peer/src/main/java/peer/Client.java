package peer;

import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import org.redisson.Redisson;
import org.redisson.api.RedissonClient;
import org.redisson.config.Config;

/** One Redisson instance and its named threads. */
final class Client {
    final RedissonClient redisson;
    final String id;
    private final Map<String, NamedThread> threads = new ConcurrentHashMap<>();

    private Client(RedissonClient redisson) throws ReflectiveOperationException {
        this.redisson = redisson;
        this.id = idOf(redisson);
    }

    static Client open(Config config) throws ReflectiveOperationException {
        return new Client(Redisson.create(config));
    }

    NamedThread thread(String name) {
        return threads.computeIfAbsent(name, NamedThread::new);
    }

    void close() {
        // Not shutdown(): in some versions it first waits two quiet seconds.
        redisson.shutdown(0, 2, TimeUnit.SECONDS);
        threads.values().forEach(NamedThread::stop);
    }

    /** The UUID in OWNER: getId() where there is one, otherwise (3.8.1) the connection manager's. */
    private static String idOf(RedissonClient redisson) throws ReflectiveOperationException {
        Object source = redisson;
        try {
            redisson.getClass().getMethod("getId");
        } catch (NoSuchMethodException e) {
            source = redisson.getClass().getMethod("getConnectionManager").invoke(redisson);
        }
        return source.getClass().getMethod("getId").invoke(source).toString();
    }
}
