package peer;

import com.google.gson.JsonElement;
import com.google.gson.JsonNull;
import java.io.IOException;
import java.io.InputStream;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.Callable;
import java.util.concurrent.ConcurrentHashMap;

/** Passes each command to its thread. It never blocks, so no command delays another thread's. */
final class Dispatcher {
    private final Replies replies;
    private final Map<String, Client> clients = new ConcurrentHashMap<>();

    Dispatcher(Replies replies) {
        this.replies = replies;
    }

    void accept(String line) {
        JsonElement id = JsonNull.INSTANCE;
        try {
            Command command = Command.parse(line);
            id = command.id();
            dispatch(command);
        } catch (RuntimeException e) {
            replies.error(id, e, System.nanoTime());
        }
    }

    private void dispatch(Command command) {
        String op = command.text("op");
        switch (op) {
            case "version":
                answer(command, Dispatcher::version);
                break;
            case "clock":
                // The tests relate their own clock to the "ns" of the replies.
                answer(command, System::nanoTime);
                break;
            case "exit":
                answer(command, () -> null);
                Runtime.getRuntime().halt(0);
                break;
            case "open":
                aside(command, () -> open(command));
                break;
            case "close":
                aside(command, () -> close(command));
                break;
            case "threadId":
                // Runs here, as interrupt does: the named thread may be waiting for a lock.
                answer(command, () -> thread(command).id());
                break;
            case "interrupt":
                answer(command, () -> thread(command).interrupt());
                break;
            default:
                LockOp lockOp = LockOp.BY_NAME.get(op);
                if (lockOp == null) {
                    throw new BadCommand("unknown op " + op);
                }
                Client client = client(command);
                thread(command).submit(() -> answer(command, () -> lockOp.run(client, command)));
        }
    }

    /** Runs a call on the current thread and sends its reply; no failure ends the process. */
    private void answer(Command command, Callable<Object> call) {
        Object value;
        try {
            value = call.call();
        } catch (ReflectiveOperationException e) {
            replies.error(command.id(), e.getCause() == null ? e : e.getCause(), System.nanoTime());
            return;
        } catch (Throwable e) {
            replies.error(command.id(), e, System.nanoTime());
            return;
        }
        replies.value(command, value, System.nanoTime());
    }

    /** Runs a slow call that belongs to no named thread on a new thread. */
    private void aside(Command command, Callable<Object> call) {
        Thread thread = new Thread(() -> answer(command, call), command.text("op"));
        thread.setDaemon(true);
        thread.start();
    }

    private Client client(Command command) {
        Client client = clients.get(command.text("client"));
        if (client == null) {
            throw new BadCommand("no open client " + command.text("client"));
        }
        return client;
    }

    private NamedThread thread(Command command) {
        return client(command).thread(command.text("thread"));
    }

    private Object open(Command command) throws ReflectiveOperationException {
        String name = command.text("client");
        Client client = Client.open(Settings.config(command));
        if (clients.putIfAbsent(name, client) != null) {
            client.close();
            throw new BadCommand("client " + name + " is open already");
        }
        return client.id;
    }

    private Object close(Command command) {
        Client client = client(command);
        clients.remove(command.text("client"));
        client.close();
        return null;
    }

    /** The version that is really in the jar, from what Redisson's own build put there. */
    private static String version() throws IOException {
        Properties properties = new Properties();
        try (InputStream in = Dispatcher.class.getResourceAsStream(
                "/META-INF/maven/org.redisson/redisson/pom.properties")) {
            properties.load(in);
        }
        return properties.getProperty("version");
    }
}
