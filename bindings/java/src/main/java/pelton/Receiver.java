package pelton;

import static java.lang.foreign.ValueLayout.JAVA_INT;
import static java.lang.foreign.ValueLayout.JAVA_LONG;

import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.nio.BufferOverflowException;
import java.nio.ByteBuffer;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Iterator;
import java.util.List;
import java.util.NoSuchElementException;
import java.util.concurrent.Flow;
import org.jspecify.annotations.Nullable;

/**
 * Receives the messages of a channel. One thread at a time uses it. After the last message of a sender that has gone,
 * the methods throw {@link PeltonException.Closed} or {@link PeltonException.PeerDied}.
 *
 * <p>An interrupt ends a wait with {@link InterruptedException}, and no message is lost: the next call receives it.
 */
public final class Receiver extends Handle implements Iterable<byte[]> {
    /** Does something with a message, which is valid until it returns. */
    @FunctionalInterface
    public interface Handler {
        /** Called for each message, on the receiving thread. */
        void handle(Message message);
    }

    private static final int BATCH_MAX = 64, MESSAGE_BYTES = 32;

    private final MemorySegment messages = Arena.ofAuto().allocate((BATCH_MAX + 1) * MESSAGE_BYTES, 8);
    private final MemorySegment outCount = messages.asSlice(BATCH_MAX * MESSAGE_BYTES, 8);
    private final Message message = new Message(this);
    /** Messages that the library has given out, and the first of them that no caller has. The last releases all. */
    private int received, delivered;
    private boolean isBatch;

    Receiver(long address) {
        super(address);
    }

    /**
     * Connects to the sender that listens under a short name ("events") or a socket's path ("unix:PATH"), or opens the
     * channel of a directory ("path:DIR"). Waits and throws as {@link Sender#connect(String, Options)}.
     */
    public static Receiver connect(String name, Options options) throws InterruptedException {
        return new Receiver(openInSteps(
                Native.RECEIVER_OPEN_START, Native.RECEIVER_OPENING_FD, Native.RECEIVER_OPENING_FINISH, name, options::channel));
    }

    /** As {@link #connect(String, Options)} with {@link Options#DEFAULTS}. */
    public static Receiver connect(String name) throws InterruptedException {
        return connect(name, Options.DEFAULTS);
    }

    /**
     * Listens under a name for any number of senders, which join and leave, and receives from all. Does not wait. The
     * order holds for each sender.
     */
    public static Receiver gather(String name, Options options) {
        return new Receiver(open(Native.RECEIVER_GATHER, name, options::gather));
    }

    /** Waits for the next message, and returns a copy. */
    public byte[] receive() throws InterruptedException {
        byte[] bytes = copy(Native.FOREVER);
        if (bytes == null) throw new AssertionError("a wait without limit has ended without a message");
        return bytes;
    }

    /** As {@link #receive()}; returns null if there is no message within {@code timeout}. */
    public byte @Nullable [] receive(Duration timeout) throws InterruptedException {
        return copy(Native.deadline(timeout));
    }

    /** As {@link #receive()}, without a wait: returns null if there is no message. */
    public byte @Nullable [] tryReceive() {
        try {
            return copy(Native.NO_WAIT);
        } catch (InterruptedException impossible) {
            throw new AssertionError("no wait was interrupted", impossible);
        }
    }

    /**
     * As {@link #receive()}, into the buffer; allocates nothing with one of an array. Throws {@link
     * BufferOverflowException} if the message is larger than what remains there; then the message remains the next one,
     * and the buffer is as it was.
     */
    public void receive(ByteBuffer to) throws InterruptedException {
        copy(to, Native.FOREVER);
    }

    /** As {@link #receive(ByteBuffer)}; returns false if there is no message within {@code timeout}. */
    public boolean receive(ByteBuffer to, Duration timeout) throws InterruptedException {
        return copy(to, Native.deadline(timeout));
    }

    /**
     * Waits for the next message, and returns it in place, until the {@link HeldMessage} is closed; the receiver can
     * continue meanwhile. Space becomes free in order: a message that is held long delays that of later ones.
     */
    public HeldMessage receiveHeld() throws InterruptedException {
        HeldMessage held = hold(Native.FOREVER);
        if (held == null) throw new AssertionError("a wait without limit has ended without a message");
        return held;
    }

    /** As {@link #receiveHeld()}; returns null if there is no message within {@code timeout}. */
    public @Nullable HeldMessage receiveHeld(Duration timeout) throws InterruptedException {
        return hold(Native.deadline(timeout));
    }

    /**
     * Waits for the next message, and calls the handler with it in place: no bytes are copied or allocated. The message
     * is released when the handler returns, also if that throws.
     */
    public void receive(Handler handler) throws InterruptedException {
        handle(handler, 1, Native.FOREVER);
    }

    /** As {@link #receive(Handler)}; returns false if there is no message within {@code timeout}. */
    public boolean receive(Handler handler, Duration timeout) throws InterruptedException {
        return handle(handler, 1, Native.deadline(timeout)) > 0;
    }

    /**
     * Waits for a message, and calls the handler with it and those that follow it already, at most {@code countMax} and
     * 64. Returns their number. If the handler throws, the next call continues with the message after that one.
     */
    public int receiveMany(Handler handler, int countMax) throws InterruptedException {
        return handle(handler, countMax, Native.FOREVER);
    }

    /** As {@link #receiveMany(Handler, int)}, and returns copies. */
    public List<byte[]> receiveMany(int countMax) throws InterruptedException {
        List<byte[]> copies = new ArrayList<>();
        receiveMany(received -> copies.add(received.toArray()), countMax);
        return copies;
    }

    /**
     * Waits for each message; {@code hasNext} does, and takes none. Ends when the sender has closed. An interrupt ends
     * it with its flag set.
     */
    @Override
    public Iterator<byte[]> iterator() {
        return new Iterator<>() {
            @Override
            public boolean hasNext() {
                long address = enter();
                try {
                    return fetch(address, 1, Native.FOREVER);
                } catch (PeltonException.Closed closed) {
                    return false;
                } catch (InterruptedException interrupted) {
                    Thread.currentThread().interrupt();
                    return false;
                } finally {
                    exit();
                }
            }

            @Override
            public byte[] next() {
                while (hasNext()) {
                    byte[] bytes = tryReceive();
                    if (bytes != null) return bytes;
                }
                throw new NoSuchElementException("the sender has closed: hasNext() returns false");
            }
        };
    }

    /**
     * Returns the publisher of the messages, for one subscriber. A virtual thread receives a message when the
     * subscriber has requested one, and calls the subscriber. It completes when the sender has closed, and fails as
     * {@link #receive()}. The receiver is the publisher's from the subscription on: it closes the receiver before the
     * last signal, and after a cancellation. A message that was not requested is not received: under a path, the next
     * receiver gets it.
     */
    public Flow.Publisher<byte[]> publisher() {
        return new MessagePublisher(iterator(), this::close);
    }

    /**
     * After {@link PeltonException.PeerDied} or {@link PeltonException.Closed}: waits for the sender's successor, which
     * continues after the last message. Returns false if none came within {@code timeout}. Also a virtual thread waits
     * in the library.
     */
    public boolean resume(Duration timeout) throws InterruptedException {
        long address = enter();
        try {
            int result = inSlices(Native.RECEIVER_RESUME, address, Native.deadline(timeout));
            if (result < 0 && result != PeltonException.AGAIN) throw PeltonException.of(result);
            return result == PeltonException.OK;
        } finally {
            exit();
        }
    }

    /**
     * Returns the span of which the message is a part that was received last, in W3C's text, or null. In a handler:
     * {@link Message#traceparent}.
     */
    public @Nullable String traceparent() {
        long address = enter();
        try {
            return traceparent(address, received == 0);
        } finally {
            exit();
        }
    }

    /** Of the message in a handler. */
    @Nullable String handledTraceparent() {
        return traceparent(address(), delivered + 1 == received);
    }

    /** A message with a traceparent is the last one of its batch. */
    private static @Nullable String traceparent(long address, boolean isLast) {
        return isLast ? Native.traceparent(Native.RECEIVER_TRACEPARENT, address) : null;
    }

    /** Returns the receiver's sizes, peer and counters. Does not wait. */
    public Info info() {
        return info(Native.RECEIVER_GET_INFO, Info.RECEIVER_BYTES, Info::ofReceiver);
    }

    /**
     * Returns the descriptor for an event loop, which it polls for reading while the receiver is armed. It is constant;
     * do not read or close it.
     */
    public int fd() {
        return invoke(Native.RECEIVER_FD);
    }

    /**
     * Makes the descriptor readable once there is a message, or the sender has gone. Does not wait. Returns false if
     * there is a message now: receive first. Throws as {@link #receive()} when the sender has gone.
     */
    public boolean arm() {
        return received == 0 && invoke(Native.RECEIVER_ARM) == PeltonException.OK;
    }

    /** Ends what {@link #arm} began: when the descriptor is readable, before the messages are received. */
    public void disarm() {
        invoke(Native.RECEIVER_DISARM);
    }

    private byte @Nullable [] copy(long deadlineNs) throws InterruptedException {
        long address = enter();
        try {
            if (!fetch(address, 1, deadlineNs)) return null;
            begin();
            // Without memory for the copy, the message remains the next one.
            byte[] bytes;
            try {
                bytes = message.toArray();
            } finally {
                message.end();
            }
            delivered(address);
            return bytes;
        } finally {
            exit();
        }
    }

    private boolean copy(ByteBuffer to, long deadlineNs) throws InterruptedException {
        long address = enter();
        try {
            if (!fetch(address, 1, deadlineNs)) return false;
            begin();
            try {
                message.copyTo(to);
            } finally {
                message.end();
            }
            delivered(address);
            return true;
        } finally {
            exit();
        }
    }

    private @Nullable HeldMessage hold(long deadlineNs) throws InterruptedException {
        long address = enter();
        try {
            if (!fetch(address, 1, deadlineNs)) return null;
            // The library holds no message of a batch.
            if (isBatch) {
                begin();
                HeldMessage held;
                try {
                    held = HeldMessage.ofCopy(message);
                } finally {
                    message.end();
                }
                delivered(address);
                return held;
            }
            long data = messages.get(JAVA_LONG, 0), size = messages.get(JAVA_LONG, 8);
            PeltonException.check((int) Native.RECEIVER_HOLD.invokeExact(address, outCount));
            received = delivered = 0;
            return new HeldMessage(outCount.get(JAVA_LONG, 0), data, size);
        } catch (InterruptedException interrupted) {
            throw interrupted;
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        } finally {
            exit();
        }
    }

    private int handle(Handler handler, int countMax, long deadlineNs) throws InterruptedException {
        if (countMax < 1) throw new IllegalArgumentException("countMax is " + countMax + ", wanted 1 or more");
        long address = enter();
        try {
            if (!fetch(address, Math.min(countMax, BATCH_MAX), deadlineNs)) return 0;
            int count = 0;
            do {
                begin();
                try {
                    handler.handle(message);
                } finally {
                    message.end();
                    delivered(address);
                }
                count++;
            } while (received > 0 && count < countMax);
            return count;
        } finally {
            exit();
        }
    }

    private void begin() {
        long at = (long) delivered * MESSAGE_BYTES;
        message.begin(
                messages.get(JAVA_LONG, at),
                messages.get(JAVA_LONG, at + 8),
                messages.get(JAVA_INT, at + 20),
                messages.get(JAVA_INT, at + 24) != 0);
    }

    private void delivered(long address) {
        if (++delivered < received) return;
        boolean hasDescriptors = messages.get(JAVA_INT, 28) != 0;
        received = delivered = 0;
        try {
            PeltonException.check(
                    hasDescriptors
                            ? (int) Native.RELEASE_DESCRIPTORS.invokeExact(address)
                            : (int) Native.RELEASE.invokeExact(address));
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        }
    }

    /** Ensures that a message is there to deliver. Returns false at the deadline. */
    private boolean fetch(long address, int count, long deadlineNs) throws InterruptedException {
        if (received > 0) return true;
        try {
            int result = receive(address, deadlineNs == Native.NO_WAIT ? Native.NO_WAIT : Native.SOON, count);
            if (result == PeltonException.AGAIN && deadlineNs != Native.NO_WAIT)
                result = Thread.currentThread().isVirtual()
                        ? awaitParked(address, count, deadlineNs)
                        : awaitInSlices(address, count, deadlineNs);
            if (result == PeltonException.AGAIN) return false;
            PeltonException.check(result);
        } catch (InterruptedException interrupted) {
            throw interrupted;
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        }
        received = count == 1 ? 1 : (int) outCount.get(JAVA_LONG, 0);
        isBatch = count > 1;
        return true;
    }

    /** Receives without a wait, or within microseconds. */
    private int receive(long address, long soonNs, int count) throws Throwable {
        return count == 1
                ? (int) Native.TRY_RECEIVE.invokeExact(address, soonNs, messages)
                : (int) Native.TRY_RECEIVE_BATCH.invokeExact(address, soonNs, messages, (long) count, outCount);
    }

    private int awaitInSlices(long address, int count, long deadlineNs) throws Throwable {
        while (true) {
            if (Thread.interrupted()) throw new InterruptedException();
            long slice = Native.slice(deadlineNs);
            int result = count == 1
                    ? (int) Native.RECEIVE.invokeExact(address, slice, messages)
                    : (int) Native.RECEIVE_BATCH.invokeExact(address, slice, messages, (long) count, outCount);
            if (result != PeltonException.AGAIN || Native.isPast(deadlineNs)) return result;
        }
    }

    private int awaitParked(long address, int count, long deadlineNs) throws Throwable {
        while (true) {
            if (Thread.interrupted()) throw new InterruptedException();
            int result = (int) Native.RECEIVER_POLL.invokeExact(address);
            if (result == PeltonException.AGAIN) {
                result = (int) Native.RECEIVER_ARM.invokeExact(address);
                if (result == PeltonException.OK) {
                    try {
                        park(Native.RECEIVER_FD, address, deadlineNs);
                    } finally {
                        int ignored = (int) Native.RECEIVER_DISARM.invokeExact(address);
                    }
                }
            }
            if (result < 0) return result;
            result = receive(address, Native.NO_WAIT, count);
            if (result != PeltonException.AGAIN || Native.isPast(deadlineNs)) return result;
        }
    }
}
