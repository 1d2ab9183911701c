package pelton;

import static java.lang.foreign.ValueLayout.JAVA_BYTE;
import static java.lang.foreign.ValueLayout.JAVA_INT;
import static java.lang.foreign.ValueLayout.JAVA_LONG;

import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import org.jspecify.annotations.Nullable;

/**
 * Sends each message to up to 64 {@link Subscriber}s, in processes or threads, which join and leave at any time. The
 * message is in memory once. One thread at a time uses it. After {@link #close} they receive what the lane has for
 * them, and then the end. The end of a subscriber is no error.
 *
 * <p>It admits subscribers, and notices their ends, within its own calls: one that sends does that if 10 ms have passed
 * since the last time. A publisher that sends rarely calls {@link #admit}.
 */
public final class Publisher extends Handle {
    private static final int SUBSCRIBERS_MAX = 64, STATE_BYTES = 128;

    /** The message that is sent. */
    private MemorySegment buffer = Arena.ofAuto().allocate(4096, 8);

    private Publisher(long address) {
        super(address);
    }

    /**
     * Publishes under a short name ("prices") or a socket's path ("unix:PATH"). Does not wait. Throws {@link
     * PeltonException}: another process has the name, or an option is invalid.
     *
     * <p>"path:DIR" creates the broadcast in a directory, or continues as its publisher, with the sizes that it has. It
     * waits while another publisher is alive: for the timeout of the options' lane, and without one for 200 ms. Then it
     * throws {@link PeltonException}. Subscribers join there by themselves.
     */
    public static Publisher open(String name, PublisherOptions options) {
        return new Publisher(open(Native.PUBLISHER_OPEN, name, options::toNative));
    }

    /** As {@link #open(String, PublisherOptions)} with {@link PublisherOptions#DEFAULTS}. */
    public static Publisher open(String name) {
        return open(name, PublisherOptions.DEFAULTS);
    }

    /** Publishes to threads of this process alone: {@link #subscriber} creates their subscribers. Does not wait. */
    public static Publisher ofThreads(PublisherOptions options) {
        return new Publisher(open(Native.PUBLISHER_OPEN, null, options::toNative));
    }

    /**
     * Creates a subscriber for a thread of this process, which has joined already. Does not wait. Of the options'
     * connection only {@code spin} may be set. Throws {@link PeltonException}: there are 64 subscribers, or it could
     * hold the publisher up for longer than that permits; or the publisher is in a directory, where threads use {@link
     * Subscriber#connect}, too.
     */
    public Subscriber subscriber(SubscriberOptions options) {
        long address = enter();
        try (Arena arena = Arena.ofConfined()) {
            MemorySegment out = arena.allocate(8, 8);
            PeltonException.check(
                    (int) Native.PUBLISHER_SUBSCRIBER.invokeExact(address, options.toNative(arena), out));
            return new Subscriber(out.get(JAVA_LONG, 0));
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        } finally {
            exit();
        }
    }

    /**
     * Copies the message into the lane. Waits while a subscriber that gates holds the lane full. An interrupt ends the
     * wait: nothing was sent. Throws {@link PeltonException.TooLarge}.
     */
    public void send(byte[] message) throws InterruptedException {
        boolean sent = send(message, Native.FOREVER);
        assert sent;
    }

    /** As {@link #send(byte[])}; returns false if there is no space within {@code timeout}. */
    public boolean send(byte[] message, Duration timeout) throws InterruptedException {
        return send(message, Native.deadline(timeout));
    }

    /** As {@link #send(byte[])}, without a wait: returns false if there is no space. */
    public boolean trySend(byte[] message) {
        try {
            return send(message, Native.NO_WAIT);
        } catch (InterruptedException impossible) {
            throw new AssertionError("no wait was interrupted", impossible);
        }
    }

    private boolean send(byte[] message, long deadlineNs) throws InterruptedException {
        long address = enter(), size = message.length;
        try {
            if (buffer.byteSize() < size) buffer = Arena.ofAuto().allocate(Math.max(size, 2 * buffer.byteSize()), 8);
            MemorySegment.copy(message, 0, buffer, JAVA_BYTE, 0, message.length);
            int result = (int) Native.PUBLISHER_SEND.invokeExact(address, buffer, size, Native.NO_WAIT);
            boolean isVirtual = Thread.currentThread().isVirtual();
            while (result == PeltonException.AGAIN && !Native.isPast(deadlineNs)) {
                if (Thread.interrupted()) throw new InterruptedException();
                if (isVirtual) {
                    awaitSpace(address, size, deadlineNs);
                    result = (int) Native.PUBLISHER_SEND.invokeExact(address, buffer, size, Native.NO_WAIT);
                } else {
                    result = (int)
                            Native.PUBLISHER_SEND.invokeExact(address, buffer, size, Native.slice(deadlineNs));
                }
            }
            if (result == PeltonException.AGAIN) return false;
            PeltonException.check(result);
            return true;
        } catch (InterruptedException interrupted) {
            throw interrupted;
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        } finally {
            exit();
        }
    }

    /** Parks until there is space, or the deadline. It may be for nothing. */
    private void awaitSpace(long address, long size, long deadlineNs) throws Throwable {
        int result = (int) Native.PUBLISHER_ARM.invokeExact(address, size);
        PeltonException.check(result);
        if (result == PeltonException.READY) return;
        try {
            park(Native.PUBLISHER_FD, address, deadlineNs);
        } finally {
            int ignored = (int) Native.PUBLISHER_DISARM.invokeExact(address);
        }
    }

    /** Admits subscribers that have connected, and lets go those that have ended. Does not wait. */
    public void admit() {
        try {
            boolean isDone = waitSubscribers(0, Native.NO_WAIT);
            assert isDone;
        } catch (InterruptedException impossible) {
            throw new AssertionError("no wait was interrupted", impossible);
        }
    }

    /**
     * Waits until there are {@code count} subscribers; returns false if there are fewer after {@code timeout}. Also a
     * virtual thread waits in the library.
     */
    public boolean waitSubscribers(int count, Duration timeout) throws InterruptedException {
        if (count < 0) throw new IllegalArgumentException("count is " + count + ", wanted 0 or more");
        return waitSubscribers(count, Native.deadline(timeout));
    }

    private boolean waitSubscribers(int count, long deadlineNs) throws InterruptedException {
        long address = enter();
        try {
            while (true) {
                if (deadlineNs != Native.NO_WAIT && Thread.interrupted()) throw new InterruptedException();
                int result = (int) Native.PUBLISHER_WAIT_SUBSCRIBERS.invokeExact(
                        address, (long) count, Native.slice(deadlineNs));
                if (result == PeltonException.AGAIN && !Native.isPast(deadlineNs)) continue;
                if (result == PeltonException.AGAIN) return false;
                PeltonException.check(result);
                return true;
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
     * Waits until each subscriber that gates has released every message; returns false if one has not within {@code
     * timeout}. One with {@code lagAfter} that releases nothing for so long lags from then on, and is not waited for.
     * Also a virtual thread waits in the library.
     */
    public boolean waitReleased(Duration timeout) throws InterruptedException {
        long address = enter();
        try {
            int result = inSlices(Native.PUBLISHER_WAIT_RELEASED, address, Native.deadline(timeout));
            if (result < 0 && result != PeltonException.AGAIN) throw PeltonException.of(result);
            return result == PeltonException.OK;
        } finally {
            exit();
        }
    }

    /** Returns the subscribers that have joined, and how far each is behind. Does not wait or admit. */
    public List<SubscriberState> subscribers() {
        long address = enter();
        try (Arena arena = Arena.ofConfined()) {
            MemorySegment states = arena.allocate((long) SUBSCRIBERS_MAX * STATE_BYTES, 8);
            MemorySegment count = arena.allocate(8, 8);
            PeltonException.check((int)
                    Native.PUBLISHER_SUBSCRIBERS.invokeExact(address, states, (long) SUBSCRIBERS_MAX, count));
            List<SubscriberState> found = new ArrayList<>();
            for (long at = 0; at < count.get(JAVA_LONG, 0) * STATE_BYTES; at += STATE_BYTES)
                found.add(new SubscriberState(
                        states.get(JAVA_INT, at),
                        states.get(JAVA_INT, at + 4),
                        durable(states.getString(at + 8)),
                        Policy.of(states.get(JAVA_INT, at + 80)),
                        duration(states.get(JAVA_LONG, at + 88)),
                        states.get(JAVA_INT, at + 84) != 0,
                        states.get(JAVA_LONG, at + 104),
                        states.get(JAVA_LONG, at + 112),
                        states.get(JAVA_LONG, at + 120),
                        duration(states.get(JAVA_LONG, at + 96))));
            return found;
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        } finally {
            exit();
        }
    }

    private static @Nullable String durable(String name) {
        return name.isEmpty() ? null : name;
    }

    private static @Nullable Duration duration(long ns) {
        return ns == 0 ? null : Duration.ofNanos(ns);
    }

    /**
     * Returns the descriptor for an event loop: when it is readable for reading, call {@link #admit}. It is constant;
     * do not read or close it.
     */
    public int fd() {
        return invoke(Native.PUBLISHER_FD);
    }

    /** Returns the publisher's sizes and counters. Does not wait. */
    public Info info() {
        return info(Native.PUBLISHER_GET_INFO, Info.PUBLISHER_BYTES, Info::ofPublisher);
    }
}
