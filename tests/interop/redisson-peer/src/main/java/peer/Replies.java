package peer;

import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import java.io.PrintStream;

/** Writes replies, one line each, from any thread. */
final class Replies {
    private static final Gson GSON = new GsonBuilder().serializeNulls().create();

    private final PrintStream out;

    Replies(PrintStream out) {
        this.out = out;
    }

    /** ns is System.nanoTime(), which is CLOCK_MONOTONIC on Linux, taken when the call returned. */
    void value(Command command, Object value, long ns) {
        JsonObject reply = new JsonObject();
        reply.add("id", command.id());
        reply.addProperty("ok", true);
        reply.add("value", GSON.toJsonTree(value));
        reply.addProperty("ns", ns);
        write(reply);
    }

    void error(JsonElement id, Throwable error, long ns) {
        JsonObject reply = new JsonObject();
        reply.add("id", id);
        reply.addProperty("ok", false);
        reply.addProperty("error", error.getClass().getSimpleName());
        reply.addProperty("message", String.valueOf(error.getMessage()));
        reply.addProperty("ns", ns);
        write(reply);
    }

    private void write(JsonObject reply) {
        String line = GSON.toJson(reply);
        synchronized (out) {
            out.print(line);
            out.print('\n');
            out.flush();
        }
    }
}
