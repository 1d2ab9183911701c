package pelton;

import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.invoke.MethodHandle;
import java.util.HashSet;
import java.util.List;
import java.util.Set;
import java.util.concurrent.Executor;
import java.util.concurrent.RejectedExecutionException;
import org.jspecify.annotations.Nullable;

/** Replies to the calls of clients. One thread runs it; its handlers run on threads of their own. */
public final class Service extends Handle {
    /** Replies to a request. */
    @FunctionalInterface
    public interface Handler {
        /**
         * Returns the reply, or after {@link Request#part} its last part; null ends a reply in parts, and is an empty
         * one otherwise. {@link PeltonException.Failed} fails the call with its code and bytes; any other exception is
         * logged, and fails it with code 1 and the exception's text. When the client cancels the call or goes, the
         * thread is interrupted. What is returned for a notification is dropped.
         */
        byte @Nullable [] handle(Request request) throws Exception;
    }

    /** The longest time until a handler is interrupted after a cancellation: how often the service checks for one. */
    private static final long CANCEL_NS = 5_000_000;

    private static final int CANCEL_REQUESTS = 64;

    private final Set<Request> running = new HashSet<>();
    private volatile boolean isStopped;

    private Service(long address) {
        super(address);
    }

    /**
     * Listens under a short name ("events") or a socket's path ("unix:PATH"). Does not wait: {@link #run} accepts
     * clients. Throws {@link PeltonException} if another process listens there.
     */
    public static Service listen(String name, Options options) {
        return new Service(open(Native.SERVICE_OPEN, name, options::service));
    }

    /** As {@link #listen(String, Options)} with {@link Options#DEFAULTS}. */
    public static Service listen(String name) {
        return listen(name, Options.DEFAULTS);
    }

    /**
     * Runs the handler with each request, on a virtual thread of its own, until {@link #stop}, or the end of {@link
     * #drain}. Then it waits for the handlers in progress. An interrupt interrupts the handlers, waits for them, and
     * throws. The service remains open: close it.
     */
    public void run(Handler handler) throws InterruptedException {
        run(handler, task -> Thread.ofVirtual().start(task));
    }

    /**
     * As {@link #run(Handler)}, on an executor's threads. A request that it rejects is dropped without a reply. With
     * {@code Runnable::run} the calling thread handles one request after the other: the fastest for handlers that take
     * microseconds. No cancellation interrupts them, and {@link Request#isCancelled} and {@link Request#part} do not
     * learn of one.
     */
    public void run(Handler handler, Executor executor) throws InterruptedException {
        long address = enter();
        try (Arena arena = Arena.ofConfined()) {
            try {
                serve(address, arena.allocate(40, 8), handler, executor);
            } catch (InterruptedException interrupted) {
                dropWaiting();
                for (Request request : running()) request.interrupt();
                throw interrupted;
            } finally {
                if (isStopped) dropWaiting();
                awaitHandlers();
            }
        } finally {
            exit();
        }
    }

    private void serve(long address, MemorySegment received, Handler handler, Executor executor)
            throws InterruptedException {
        long lookedNs = 0;
        int count = 0;
        try {
            while (true) {
                if (Thread.interrupted()) throw new InterruptedException();
                int result = (int) Native.SERVICE_RECEIVE.invokeExact(address, Native.NO_WAIT, received);
                if (result == PeltonException.OK) {
                    Request request;
                    try {
                        request = new Request(received);
                    } finally {
                        PeltonException.check((int) Native.SERVICE_RELEASE.invokeExact(address));
                    }
                    start(request, handler, executor);
                    // Also while requests keep coming.
                    if (++count % CANCEL_REQUESTS == 0) lookedNs = interruptCancelled(lookedNs);
                    continue;
                }
                if (result == PeltonException.CLOSED) return;
                if (result == PeltonException.AGAIN) result = (int) Native.SERVICE_POLL.invokeExact(address);
                if (result == PeltonException.OK) continue;
                long untilNs = Native.FOREVER, beforeNs = lookedNs;
                lookedNs = interruptCancelled(lookedNs);
                if (lookedNs == beforeNs && isRunning()) untilNs = lookedNs + CANCEL_NS;
                if (result == PeltonException.AGAIN) result = (int) Native.SERVICE_ARM.invokeExact(address);
                if (result == PeltonException.OK) {
                    try {
                        if (Thread.currentThread().isVirtual()) park(Native.SERVICE_FD, address, untilNs);
                        else Native.awaitReadable((int) Native.SERVICE_FD.invokeExact(address), untilNs);
                    } finally {
                        int ignored = (int) Native.SERVICE_DISARM.invokeExact(address);
                    }
                } else if (result != PeltonException.CLOSED) {
                    PeltonException.check(result);
                }
            }
        } catch (InterruptedException interrupted) {
            throw interrupted;
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        }
    }

    /** Interrupts the handlers of cancelled calls, if the last time is long enough ago. Returns the last time. */
    private long interruptCancelled(long lookedNs) {
        long nowNs = Native.deadline(0L);
        if (nowNs - lookedNs < CANCEL_NS) return lookedNs;
        for (Request request : running()) if (request.isCancelled()) request.interrupt();
        return nowNs;
    }

    /** An executor can keep a task for long, or drop it. */
    private void dropWaiting() {
        for (Request request : running()) if (request.drop()) ended(request);
    }

    private void start(Request request, Handler handler, Executor executor) {
        synchronized (running) {
            running.add(request);
        }
        try {
            executor.execute(() -> {
                try {
                    request.handle(handler);
                } finally {
                    ended(request);
                }
            });
        } catch (RejectedExecutionException rejected) {
            request.abandon();
            ended(request);
        } catch (Throwable failure) {
            request.abandon();
            ended(request);
            throw failure;
        }
    }

    private void ended(Request request) {
        synchronized (running) {
            running.remove(request);
            if (running.isEmpty()) running.notifyAll();
        }
    }

    private boolean isRunning() {
        synchronized (running) {
            return !running.isEmpty();
        }
    }

    private List<Request> running() {
        synchronized (running) {
            return List.copyOf(running);
        }
    }

    /** Also an interrupted thread waits: the handlers use what it closes next. */
    private void awaitHandlers() {
        boolean wasInterrupted = false;
        synchronized (running) {
            while (!running.isEmpty()) {
                try {
                    running.wait(CANCEL_NS / 1_000_000);
                    for (Request request : running) if (request.isCancelled()) request.interrupt();
                } catch (InterruptedException interrupted) {
                    wasInterrupted = true;
                    dropWaiting();
                    for (Request request : running) request.interrupt();
                }
            }
        }
        if (wasInterrupted) Thread.currentThread().interrupt();
    }

    /**
     * Ends {@link #run} now; calls that have no reply fail when the service is closed, and requests whose handlers have
     * not begun are dropped. Any thread, also a handler.
     */
    public synchronized void stop() {
        end(Native.SERVICE_STOP);
        isStopped = true;
        dropWaiting();
    }

    /**
     * Requests that were received get their replies; later ones go back to their clients, which submit them to another
     * process of the name. {@link #run} returns when every client knows its replies. Start a successor first. Any
     * thread, also a handler.
     */
    public synchronized void drain() {
        end(Native.SERVICE_DRAIN);
    }

    private void end(MethodHandle function) {
        try {
            PeltonException.check((int) function.invokeExact(address()));
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        }
    }

    /** Closes the service. Calls in flight fail at their clients with {@link PeltonException.Closed}. */
    @Override
    public synchronized void close() {
        super.close();
    }
}
