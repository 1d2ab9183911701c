package pelton;

import static java.lang.foreign.ValueLayout.ADDRESS;
import static java.lang.foreign.ValueLayout.JAVA_BYTE;
import static java.lang.foreign.ValueLayout.JAVA_INT;
import static java.lang.foreign.ValueLayout.JAVA_LONG;

import java.lang.System.Logger.Level;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Arrays;
import java.util.concurrent.CancellationException;
import org.jspecify.annotations.Nullable;

/** A request that a service has received. Its handler uses it, also on other threads, until it returns. */
public final class Request {
    /** The code of a failure by an exception of the handler, and the bytes of its text at most. */
    private static final int EXCEPTION = 1, TEXT_BYTES_MAX = 4000;
    /** A part that finds no space tries again after so long at least, and at most. */
    private static final long RETRY_NS_MIN = 50_000, RETRY_NS_MAX = 2_000_000;

    private final byte[] bytes;
    private final long deadlineNs;
    private final int pid, uid;
    private final boolean isNotification;
    /** The C handle, 0 once the call has ended. Guarded by this. */
    private long responder;
    private boolean hasParts;
    /** The handler's thread, while it is in the handler. Guarded by this. */
    private @Nullable Thread thread;
    private boolean isInterrupted, isStarted, isDropped;

    /** Copies a {@code pelton_request}. */
    Request(MemorySegment request) {
        // The library keeps that many bytes there until the release.
        bytes = request.get(ADDRESS, 0).reinterpret(request.get(JAVA_LONG, 8)).toArray(JAVA_BYTE);
        responder = request.get(JAVA_LONG, 16);
        deadlineNs = request.get(JAVA_LONG, 24);
        pid = request.get(JAVA_INT, 32);
        uid = request.get(JAVA_INT, 36);
        isNotification = responder == 0;
    }

    /** Returns the request's bytes: always the same array. */
    public byte[] bytes() {
        return bytes;
    }

    /** Returns whether the client awaits no reply. */
    public boolean isNotification() {
        return isNotification;
    }

    /** Returns how long the client still waits for the reply, zero or less if no longer; null is without limit. */
    public @Nullable Duration timeLeft() {
        return deadlineNs == Native.FOREVER ? null : Duration.ofNanos(deadlineNs - Native.deadline(0L));
    }

    /** Returns the client's process. */
    public int peerPid() {
        return pid;
    }

    /** Returns the client's user, unsigned. */
    public int peerUid() {
        return uid;
    }

    /** Returns the span of which the call is a part, in W3C's text, or null. Its children are this service's spans. */
    public synchronized @Nullable String traceparent() {
        return responder == 0 ? null : Native.traceparent(Native.RESPONDER_TRACEPARENT, responder);
    }

    /** Returns whether the client has cancelled the call or has gone. The handler's thread is interrupted then, too. */
    public synchronized boolean isCancelled() {
        if (responder == 0) return false;
        try {
            return (int) Native.RESPONDER_IS_CANCELLED.invokeExact(responder) == 1;
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        }
    }

    /**
     * Sends a part of the reply. Waits for space in the client's lane, which parks a virtual thread. Throws {@link
     * CancellationException} if the client has cancelled the call or has gone, and {@link PeltonException.TooLarge}.
     */
    public void part(byte[] part) throws InterruptedException {
        long retryNs = RETRY_NS_MIN;
        while (!tryPart(part)) {
            Thread.sleep(Duration.ofNanos(retryNs));
            retryNs = Math.min(2 * retryNs, RETRY_NS_MAX);
        }
    }

    private synchronized boolean tryPart(byte[] part) {
        if (responder == 0)
            throw new IllegalStateException("the request has no reply in parts: it is a notification, or has ended");
        if (isCancelled()) throw cancelled();
        try (Arena arena = Arena.ofConfined()) {
            int result = (int) Native.RESPONDER_PART.invokeExact(
                    responder, arena.allocateFrom(JAVA_BYTE, part), (long) part.length, Native.NO_WAIT);
            if (hasLeft(result)) throw cancelled();
            if (result == PeltonException.AGAIN) return false;
            PeltonException.check(result);
            hasParts = true;
            return true;
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        }
    }

    private static CancellationException cancelled() {
        return new CancellationException("the client has cancelled the call, or has gone");
    }

    private static boolean hasLeft(int result) {
        return result == PeltonException.CLOSED || result == PeltonException.PEER_DIED;
    }

    /** Runs the handler on this thread, and ends the call. */
    void handle(Service.Handler handler) {
        synchronized (this) {
            if (isDropped) return;
            isStarted = true;
            thread = Thread.currentThread();
            if (isInterrupted) thread.interrupt();
        }
        boolean wasInterrupted = false;
        try {
            wasInterrupted = handleAndEnd(handler);
        } catch (Throwable failure) {
            // Nobody is left to receive it, and this can be the service's own thread.
            System.getLogger("pelton").log(Level.ERROR, "the reply of a service's handler failed", failure);
        } finally {
            synchronized (this) {
                thread = null;
                // The executor's thread has other work.
                if (isInterrupted) Thread.interrupted();
                // Another one meant the thread.
                else if (wasInterrupted) Thread.currentThread().interrupt();
            }
            abandon();
        }
    }

    /** Returns whether the handler was interrupted. */
    private boolean handleAndEnd(Service.Handler handler) {
        try {
            byte[] reply = handler.handle(this);
            if (reply == null) end();
            else reply(reply);
        } catch (PeltonException.Failed failed) {
            fail(failed.code(), failed.bytes());
        } catch (Throwable failure) {
            if (isEndOfCancelled(failure)) return failure instanceof InterruptedException;
            System.getLogger("pelton").log(Level.ERROR, "the handler of a service failed", failure);
            byte[] text = failure.toString().getBytes(StandardCharsets.UTF_8);
            fail(EXCEPTION, text.length > TEXT_BYTES_MAX ? Arrays.copyOf(text, TEXT_BYTES_MAX) : text);
            return failure instanceof InterruptedException;
        }
        return false;
    }

    /** Ends the call without a reply if its handler has not begun, which then never does. Returns whether it did so. */
    synchronized boolean drop() {
        if (isStarted) return false;
        isDropped = true;
        abandon();
        return true;
    }

    /** A cancelled handler ends by an exception of its own choice, which nobody awaits. */
    private boolean isEndOfCancelled(Throwable failure) {
        return (failure instanceof InterruptedException || failure instanceof CancellationException) && isCancelled();
    }

    /** Interrupts the handler, once. */
    synchronized void interrupt() {
        if (isInterrupted) return;
        isInterrupted = true;
        if (thread != null) thread.interrupt();
    }

    private synchronized void reply(byte[] reply) {
        if (responder == 0) return;
        try (Arena arena = Arena.ofConfined()) {
            finished((int) Native.RESPONDER_REPLY.invokeExact(
                    responder, arena.allocateFrom(JAVA_BYTE, reply), (long) reply.length));
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        }
    }

    private synchronized void end() {
        if (responder == 0) return;
        try {
            if (hasParts) {
                finished((int) Native.RESPONDER_END.invokeExact(responder));
            } else {
                reply(new byte[0]);
            }
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        }
    }

    private synchronized void fail(int code, byte[] text) {
        if (responder == 0) return;
        try (Arena arena = Arena.ofConfined()) {
            int result = (int) Native.RESPONDER_FAIL.invokeExact(
                    responder, code, arena.allocateFrom(JAVA_BYTE, text), (long) text.length);
            if (result == PeltonException.TOO_LARGE)
                result = (int) Native.RESPONDER_FAIL.invokeExact(responder, code, MemorySegment.NULL, 0L);
            finished(result);
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        }
    }

    /** After a function that ends the call: after this error it has not. A client that has left needs no reply. */
    private void finished(int result) {
        if (result == PeltonException.TOO_LARGE) throw PeltonException.of(result);
        responder = 0;
        if (!hasLeft(result)) PeltonException.check(result);
    }

    /** Ends the call without a reply, if it has not ended. */
    synchronized void abandon() {
        if (responder == 0) return;
        try {
            int ignored = (int) Native.CLOSE.invokeExact(responder);
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        }
        responder = 0;
    }
}
