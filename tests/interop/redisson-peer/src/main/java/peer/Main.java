package peer;

import java.io.BufferedReader;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;

/**
 * Reads one JSON command per line from stdin and answers each with one JSON line on stdout.
 *
 * <pre>
 * {"id":1,"op":"lock","client":"c1","thread":"t1","name":"order:42"}
 * {"id":1,"ok":true,"value":null,"ns":1334246597208}
 * {"id":2,"ok":false,"error":"IllegalMonitorStateException","message":"...","ns":1334246612345}
 * </pre>
 *
 * <p>"ns" is CLOCK_MONOTONIC when the call returned. Commands of one thread of a client run in
 * order, all others at the same time, so that replies come in any order. The fields of each op,
 * besides id; those in brackets may be left out:
 *
 * <pre>
 * version                                              Redisson's version
 * clock                                                CLOCK_MONOTONIC in nanoseconds
 * exit                                                 ends the process, as the end of stdin does
 * open   client url [mode] [watchdogMs] [settings]     the client's UUID; mode: single, cluster
 * close  client
 * threadId, interrupt    client thread                 id; whether the thread was in a command
 * lock                   client thread name [leaseMs]
 * tryLock                client thread name [waitMs] [leaseMs]
 * isHeldByThread         client thread name [threadId] the thread's own id by default
 * unlock, forceUnlock, isLocked, isHeldByCurrentThread, getHoldCount, remainTimeToLive
 *                        client thread name
 * increment              client thread name key n      the last value written
 * </pre>
 */
public final class Main {
    private Main() {
    }

    public static void main(String[] args) throws IOException {
        System.setProperty("org.slf4j.simpleLogger.defaultLogLevel", "warn");
        Replies replies = new Replies(
                new PrintStream(new FileOutputStream(FileDescriptor.out), false, "UTF-8"));
        // A library that prints must not break the protocol.
        System.setOut(System.err);

        Dispatcher dispatcher = new Dispatcher(replies);
        BufferedReader in = new BufferedReader(
                new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            if (!line.trim().isEmpty()) {
                dispatcher.accept(line);
            }
        }
        // The test process has ended: exit at once, even if threads are blocked.
        Runtime.getRuntime().halt(0);
    }
}
