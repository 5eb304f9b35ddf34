package peer;

import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;

/** A real Java thread that runs its commands one after the other: Redisson's owner is a thread. */
final class NamedThread {
    private final BlockingQueue<Runnable> queue = new LinkedBlockingQueue<>();
    private final Thread thread;
    private boolean busy;
    private volatile boolean stopped;

    NamedThread(String name) {
        thread = new Thread(this::loop, name);
        // A thread that waits for a lock for ever must not keep the process alive.
        thread.setDaemon(true);
        thread.start();
    }

    long id() {
        return thread.getId();
    }

    void submit(Runnable command) {
        queue.add(command);
    }

    /** Interrupts the running command. Returns false, without effect, if there is none. */
    synchronized boolean interrupt() {
        if (busy) {
            thread.interrupt();
        }
        return busy;
    }

    /** Interrupts the running command, and ends the thread after the queued ones. */
    void stop() {
        submit(() -> stopped = true);
        interrupt();
    }

    private void loop() {
        while (!stopped) {
            Runnable command;
            try {
                command = queue.take();
            } catch (InterruptedException e) {
                continue;
            }
            synchronized (this) {
                busy = true;
            }
            command.run();
            synchronized (this) {
                busy = false;
                // A late interrupt must not affect the next command.
                Thread.interrupted();
            }
        }
    }
}
