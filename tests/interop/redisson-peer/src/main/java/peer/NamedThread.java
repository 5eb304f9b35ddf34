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

    /** Interrupts the command under way. False, with no effect, where there is none. */
    synchronized boolean interrupt() {
        if (busy) {
            thread.interrupt();
        }
        return busy;
    }

    /** Lets what is queued run to its end, then ends the thread. */
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
                // An interrupt that came too late belongs to no later command.
                Thread.interrupted();
            }
        }
    }
}
