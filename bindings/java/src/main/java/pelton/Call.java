package pelton;

import java.util.ArrayDeque;
import java.util.Iterator;
import java.util.NoSuchElementException;
import java.util.concurrent.CancellationException;
import java.util.concurrent.Flow;
import java.util.concurrent.locks.LockSupport;
import org.jspecify.annotations.Nullable;

/**
 * A call whose reply comes in parts, from {@link Client#stream}. One thread at a time uses it. Parts that have come and
 * are not taken are in this process's memory, up to the client's {@code callBytesMax}; beyond it the call is cancelled.
 *
 * <p>{@link #close} it: that cancels it, unless it is complete.
 */
public final class Call implements Iterable<byte[]>, AutoCloseable {
    private final Client client;
    final long deadlineNs;
    long number;
    // Guarded by the client's lock.
    final ArrayDeque<byte[]> parts = new ArrayDeque<>();
    long waitingBytes;
    boolean isComplete;
    @Nullable RuntimeException failure;
    @Nullable Thread waiting;
    /** Whether the end was taken: then nothing is left to wait for or to cancel, which needs no lock. */
    private boolean isAtEnd;

    Call(Client client, long deadlineNs) {
        this.client = client;
        this.deadlineNs = deadlineNs;
    }

    void add(byte[] part, boolean isLast) {
        parts.add(part);
        waitingBytes += part.length;
        if (isLast) isComplete = true;
        wake();
    }

    void end() {
        isComplete = true;
        wake();
    }

    /** The thread that waits can be the one that takes completions for all. */
    private void wake() {
        if (waiting != Thread.currentThread()) LockSupport.unpark(waiting);
    }

    void fail(RuntimeException failure) {
        this.failure = failure;
        end();
    }

    byte @Nullable [] take() {
        byte[] part = parts.poll();
        if (part != null) waitingBytes -= part.length;
        else if (failure != null) throw failure;
        isAtEnd = isComplete && failure == null && parts.isEmpty();
        return part;
    }

    /**
     * Waits for the next part, and returns it; null is the end. An interrupt cancels the call. Throws as {@link
     * Client#call(byte[], CallOptions)}, and {@link CancellationException} after {@link #close}.
     */
    public byte @Nullable [] next() throws InterruptedException {
        return isAtEnd ? null : client.next(this);
    }

    /**
     * Returns an iterator over the parts that are not taken yet. It throws as {@link #next}; an interrupt ends its wait
     * by a {@link CancellationException}, and the thread remains interrupted.
     */
    @Override
    public Iterator<byte[]> iterator() {
        return new Iterator<>() {
            private byte @Nullable [] part;
            private boolean isAtEnd;

            @Override
            public boolean hasNext() {
                if (part == null && !isAtEnd) {
                    try {
                        part = Call.this.next();
                    } catch (InterruptedException interrupted) {
                        Thread.currentThread().interrupt();
                        throw new CancellationException("the wait for the call's next part was interrupted");
                    }
                    isAtEnd = part == null;
                }
                return part != null;
            }

            @Override
            public byte[] next() {
                byte[] next = hasNext() ? part : null;
                part = null;
                if (next == null) throw new NoSuchElementException("the reply has ended");
                return next;
            }
        };
    }

    /**
     * Returns the publisher of the parts that are not taken yet, for one subscriber. A virtual thread delivers a part
     * when the subscriber has requested one; it fails as {@link #next}. The call is the publisher's from the
     * subscription on: a cancellation cancels the call.
     */
    public Flow.Publisher<byte[]> publisher() {
        return new MessagePublisher(iterator(), this::close);
    }

    /** Cancels the call, unless it is complete: its handler is interrupted, the reply dropped. Any thread. */
    @Override
    public void close() {
        if (!isAtEnd) client.cancel(this);
    }
}
