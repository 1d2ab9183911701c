package pelton;

import static java.lang.foreign.ValueLayout.ADDRESS;
import static java.lang.foreign.ValueLayout.JAVA_BYTE;
import static java.lang.foreign.ValueLayout.JAVA_LONG;

import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.time.Duration;
import java.util.List;

/**
 * Sends the messages of a channel. One thread at a time uses it. After {@link #close} the receiver gets every message,
 * and then the end; a process that exits without closing is reported to the receiver as died.
 *
 * <p>After the receiver has gone, the methods throw {@link PeltonException.Closed} or {@link PeltonException.PeerDied};
 * what they were to send was not sent.
 */
public final class Sender extends Handle {
    /** Larger messages are copied by Java: a critical call delays garbage collection for as long as it copies. */
    private static final int CRITICAL_BYTES_MAX = 64 << 10;

    /** Of a message with a traceparent, the additional bytes in the lane. */
    private static final int TRACED_BYTES = 40;

    private final MemorySegment out = Arena.ofAuto().allocate(8, 8);

    Sender(long address) {
        super(address);
    }

    /**
     * Connects to the receiver that listens under a short name ("events") or a socket's path ("unix:PATH"), or opens
     * the channel of a directory ("path:DIR"). Waits for the peer up to the timeout of the options. Throws {@link
     * PeltonException.NoListener}, {@link PeltonException.TimedOut}, and other {@link PeltonException}s.
     */
    public static Sender connect(String name, Options options) throws InterruptedException {
        return new Sender(openInSteps(
                Native.SENDER_OPEN_START, Native.SENDER_OPENING_FD, Native.SENDER_OPENING_FINISH, name, options::channel));
    }

    /** As {@link #connect(String, Options)} with {@link Options#DEFAULTS}. */
    public static Sender connect(String name) throws InterruptedException {
        return connect(name, Options.DEFAULTS);
    }

    /**
     * Copies the message into the lane. Waits for free space. An interrupt ends the wait: nothing was sent. Throws
     * {@link PeltonException.TooLarge}.
     */
    public void send(byte[] message) throws InterruptedException {
        send(MemorySegment.ofArray(message), Native.FOREVER);
    }

    /** As {@link #send(byte[])}; returns false if there is no space within {@code timeout}. */
    public boolean send(byte[] message, Duration timeout) throws InterruptedException {
        return send(MemorySegment.ofArray(message), Native.deadline(timeout));
    }

    /** As {@link #send(byte[])}, for the bytes of a segment in the heap or outside. */
    public void send(MemorySegment message) throws InterruptedException {
        send(message, Native.FOREVER);
    }

    /** As {@link #send(byte[])}, without a wait: returns false if there is no space. */
    public boolean trySend(byte[] message) {
        return trySend(MemorySegment.ofArray(message));
    }

    /** As {@link #trySend(byte[])}, for the bytes of a segment. */
    public boolean trySend(MemorySegment message) {
        long address = enter();
        try {
            return wasSent(trySend(address, message));
        } finally {
            exit();
        }
    }

    /**
     * As {@link #send(byte[])}, with the span of which the message is a part, in W3C's text, for {@link
     * Receiver#traceparent}. Without the option {@code traced}, or if the text is not valid, the message goes without.
     */
    public void sendTraced(byte[] message, String traceparent) throws InterruptedException {
        sendTraced(message, traceparent, Native.FOREVER);
    }

    /** As {@link #sendTraced(byte[], String)}; returns false if there is no space within {@code timeout}. */
    public boolean sendTraced(byte[] message, String traceparent, Duration timeout) throws InterruptedException {
        return sendTraced(message, traceparent, Native.deadline(timeout));
    }

    private boolean sendTraced(byte[] message, String traceparent, long deadlineNs) throws InterruptedException {
        long address = enter(), size = message.length;
        try (Arena arena = Arena.ofConfined()) {
            MemorySegment bytes = arena.allocateFrom(JAVA_BYTE, message), span = arena.allocateFrom(traceparent);
            while (true) {
                int result =
                        (int) Native.TRY_SEND_TRACED.invokeExact(address, bytes, size, span, Native.NO_WAIT);
                // The text has a place of its own in the lane.
                if (result != PeltonException.AGAIN || !awaitSpace(address, size + TRACED_BYTES, deadlineNs))
                    return wasSent(result);
            }
        } catch (InterruptedException interrupted) {
            throw interrupted;
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        } finally {
            exit();
        }
    }

    private boolean send(MemorySegment message, long deadlineNs) throws InterruptedException {
        long address = enter();
        try {
            int result = trySend(address, message);
            while (result == PeltonException.AGAIN && awaitSpace(address, message.byteSize(), deadlineNs))
                result = trySend(address, message);
            return wasSent(result);
        } finally {
            exit();
        }
    }

    private static boolean wasSent(int result) {
        if (result < 0 && result != PeltonException.AGAIN) throw PeltonException.of(result);
        return result == PeltonException.OK;
    }

    private int trySend(long address, MemorySegment message) {
        long size = message.byteSize();
        try {
            if (size <= CRITICAL_BYTES_MAX)
                return (int) Native.TRY_SEND.invokeExact(address, message, size, Native.NO_WAIT);
            int result = (int) Native.SENDER_RESERVE.invokeExact(address, size, Native.NO_WAIT, out);
            if (result != PeltonException.OK) return result;
            // The library has reserved that many bytes there.
            MemorySegment reserved = out.get(ADDRESS, 0).reinterpret(size);
            try {
                MemorySegment.copy(message, 0, reserved, 0, size);
            } catch (Throwable failure) {
                int ignored = (int) Native.SENDER_ABORT.invokeExact(address);
                throw failure;
            }
            return (int) Native.SENDER_COMMIT.invokeExact(address, size);
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        }
    }

    /** Waits for space for a message of so many bytes. Returns false at the deadline. */
    private boolean awaitSpace(long address, long size, long deadlineNs) throws InterruptedException {
        boolean isVirtual = Thread.currentThread().isVirtual();
        try {
            while (true) {
                if (Thread.interrupted()) throw new InterruptedException();
                if (Native.isPast(deadlineNs)) return false;
                if (!isVirtual) {
                    // A reservation waits in the library as a send does. The next call drops it.
                    int result = (int) Native.SENDER_RESERVE.invokeExact(address, size, Native.slice(deadlineNs), out);
                    if (result == PeltonException.AGAIN) continue;
                    PeltonException.check(result);
                    PeltonException.check((int) Native.SENDER_ABORT.invokeExact(address));
                    return true;
                }
                int result = (int) Native.SENDER_POLL.invokeExact(address, size);
                if (result == PeltonException.AGAIN) result = (int) Native.SENDER_ARM.invokeExact(address, size);
                else if (result == PeltonException.OK) return true;
                PeltonException.check(result);
                if (result == PeltonException.READY) return true;
                try {
                    park(Native.SENDER_FD, address, deadlineNs);
                } finally {
                    int ignored = (int) Native.SENDER_DISARM.invokeExact(address);
                }
                return true;
            }
        } catch (InterruptedException interrupted) {
            throw interrupted;
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        }
    }

    /**
     * Sends all messages, which become visible together. Waits for free space for all. Throws {@link
     * PeltonException.TooLarge} if together they exceed the largest message, with 16 bytes more for each; then nothing
     * was sent: send them in several calls.
     */
    public void sendAll(List<byte[]> messages) throws InterruptedException {
        long address = enter();
        try (Arena arena = Arena.ofConfined()) {
            long sizes = 0, offset = 0, at = 16L * messages.size();
            for (byte[] message : messages) sizes += message.length + 16;
            // First the vectors, then the messages.
            MemorySegment vectors = arena.allocate(Math.max(1, sizes), 8);
            for (byte[] message : messages) {
                MemorySegment.copy(message, 0, vectors, JAVA_BYTE, at, message.length);
                vectors.set(JAVA_LONG, offset, vectors.address() + at);
                vectors.set(JAVA_LONG, offset + 8, message.length);
                offset += 16;
                at += message.length;
            }
            while (true) {
                int result = (int)
                        Native.SENDER_SEND_BATCH.invokeExact(address, vectors, (long) messages.size(), Native.NO_WAIT);
                if (wasSent(result)) return;
                boolean ignored = awaitSpace(address, sizes, Native.FOREVER);
            }
        } catch (InterruptedException interrupted) {
            throw interrupted;
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        } finally {
            exit();
        }
    }

    /**
     * Waits until the receiver has released every message; returns false if it has not within {@code timeout}. Also a
     * virtual thread waits in the library.
     */
    public boolean waitReleased(Duration timeout) throws InterruptedException {
        long address = enter();
        try {
            return wasSent(inSlices(Native.SENDER_WAIT_RELEASED, address, Native.deadline(timeout)));
        } finally {
            exit();
        }
    }

    /**
     * After {@link PeltonException.PeerDied} or {@link PeltonException.Closed}: waits for the receiver's successor, and
     * passes everything unreleased on to it. Returns false if none came within {@code timeout}. Also a virtual thread
     * waits in the library.
     */
    public boolean resume(Duration timeout) throws InterruptedException {
        long address = enter();
        try {
            return wasSent(inSlices(Native.SENDER_RESUME, address, Native.deadline(timeout)));
        } finally {
            exit();
        }
    }

    /** Returns the sender's sizes, peer and counters. Does not wait. */
    public Info info() {
        return info(Native.SENDER_GET_INFO, Info.SENDER_BYTES, Info::ofSender);
    }

    /**
     * Returns a subscriber that sends what a publisher publishes, with back-pressure. The sender is the subscriber's
     * from the subscription on, which closes it at the end.
     */
    public SenderSubscriber subscriber() {
        return new SenderSubscriber(this);
    }
}
