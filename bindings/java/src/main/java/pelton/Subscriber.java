package pelton;

import static java.lang.foreign.ValueLayout.ADDRESS;
import static java.lang.foreign.ValueLayout.JAVA_BYTE;
import static java.lang.foreign.ValueLayout.JAVA_INT;
import static java.lang.foreign.ValueLayout.JAVA_LONG;

import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.time.Duration;
import java.util.Iterator;
import java.util.NoSuchElementException;
import java.util.function.Function;
import org.jspecify.annotations.Nullable;

/**
 * Receives the messages of a {@link Publisher}. One thread at a time uses it. After the last message of a publisher
 * that has gone, the methods throw {@link PeltonException.Closed} or {@link PeltonException.PeerDied}. {@link #close}
 * leaves the broadcast.
 *
 * <p>An interrupt ends a wait with {@link InterruptedException}, and no message is lost: the next call receives it; so
 * also if the heap had no space for one.
 */
public final class Subscriber extends Handle implements Iterable<Delivery> {
    private final MemorySegment delivery = Arena.ofAuto().allocate(32, 8);
    /** Whether {@code delivery} is a message that is not released. */
    private boolean isReceived;

    Subscriber(long address) {
        super(address);
    }

    /**
     * Subscribes to the publisher under a short name ("prices") or a socket's path ("unix:PATH"). Waits for it up to
     * the timeout of the options' connection. Throws {@link PeltonException.NoListener}, {@link
     * PeltonException.TimedOut}, and other {@link PeltonException}s: the publisher has 64 subscribers, or takes none
     * that could hold it up for so long.
     *
     * <p>"path:DIR" subscribes to the broadcast in a directory, with or without a publisher. The timeout is for the
     * directory, and for a durable name that another process uses: without one, 200 ms for the name. Then it throws
     * {@link PeltonException}.
     */
    public static Subscriber connect(String name, SubscriberOptions options) throws InterruptedException {
        return new Subscriber(openInSteps(
                Native.SUBSCRIBER_OPEN_START,
                Native.SUBSCRIBER_OPENING_FD,
                Native.SUBSCRIBER_OPENING_FINISH,
                name,
                options::toNative));
    }

    /**
     * Removes the durable subscription of a broadcast in a directory ("path:DIR"), which no process uses: it holds the
     * publisher up no more. Waits for at most 200 ms, while another process opens or removes one there. Throws {@link
     * PeltonException}: a process uses it, there is none of the name, or that process has stopped.
     */
    public static void remove(String name, String durable) {
        try (Arena arena = Arena.ofConfined()) {
            PeltonException.check((int) Native.SUBSCRIPTION_REMOVE.invokeExact(
                    Native.text(name, arena), Native.text(durable, arena)));
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        }
    }

    /** As {@link #connect(String, SubscriberOptions)} with {@link SubscriberOptions#DEFAULTS}. */
    public static Subscriber connect(String name) throws InterruptedException {
        return connect(name, SubscriberOptions.DEFAULTS);
    }

    /** Waits for the next message, and returns a copy. */
    public Delivery receive() throws InterruptedException {
        Delivery found = receive(Native.FOREVER);
        if (found == null) throw new AssertionError("a wait without limit has ended without a message");
        return found;
    }

    /** As {@link #receive()}; returns null if there is no message within {@code timeout}. */
    public @Nullable Delivery receive(Duration timeout) throws InterruptedException {
        return receive(Native.deadline(timeout));
    }

    /** As {@link #receive()}, without a wait: returns null if there is no message. */
    public @Nullable Delivery tryReceive() {
        try {
            return receive(Native.NO_WAIT);
        } catch (InterruptedException impossible) {
            throw new AssertionError("no wait was interrupted", impossible);
        }
    }

    private @Nullable Delivery receive(long deadlineNs) throws InterruptedException {
        long address = enter();
        try {
            int result = isReceived
                    ? PeltonException.OK
                    : (int) Native.SUBSCRIBER_RECEIVE.invokeExact(address, Native.NO_WAIT, delivery);
            boolean isVirtual = Thread.currentThread().isVirtual();
            while (result == PeltonException.AGAIN && !Native.isPast(deadlineNs)) {
                if (Thread.interrupted()) throw new InterruptedException();
                if (isVirtual) {
                    awaitMessage(address, deadlineNs);
                    result = (int) Native.SUBSCRIBER_RECEIVE.invokeExact(address, Native.NO_WAIT, delivery);
                } else {
                    result = (int)
                            Native.SUBSCRIBER_RECEIVE.invokeExact(address, Native.slice(deadlineNs), delivery);
                }
            }
            if (result == PeltonException.AGAIN) return null;
            PeltonException.check(result);
            isReceived = true;
            // The library keeps that many bytes there until the release. If the heap has no space for them, the next
            // call finds the message again.
            byte[] data = delivery.get(ADDRESS, 0)
                    .reinterpret(delivery.get(JAVA_LONG, 8))
                    .toArray(JAVA_BYTE);
            isReceived = false;
            PeltonException.check((int) Native.SUBSCRIBER_RELEASE.invokeExact(address));
            return new Delivery(data, delivery.get(JAVA_LONG, 16), delivery.get(JAVA_LONG, 24));
        } catch (InterruptedException interrupted) {
            throw interrupted;
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        } finally {
            exit();
        }
    }

    /** Parks until there is a message, or the deadline. It may be for nothing. */
    private void awaitMessage(long address, long deadlineNs) throws Throwable {
        int result = (int) Native.SUBSCRIBER_POLL.invokeExact(address);
        if (result == PeltonException.OK) return;
        if (result == PeltonException.AGAIN) result = (int) Native.SUBSCRIBER_ARM.invokeExact(address);
        PeltonException.check(result);
        if (result == PeltonException.READY) return;
        try {
            park(Native.SUBSCRIBER_FD, address, deadlineNs);
        } finally {
            int ignored = (int) Native.SUBSCRIBER_DISARM.invokeExact(address);
        }
    }

    /**
     * Waits for each message; {@code hasNext} does, and keeps it for {@code next}. Ends when the publisher has closed.
     * An interrupt ends it with its flag set.
     */
    @Override
    public Iterator<Delivery> iterator() {
        return new Iterator<>() {
            private @Nullable Delivery found;

            @Override
            public boolean hasNext() {
                try {
                    if (found == null) found = receive();
                    return true;
                } catch (PeltonException.Closed closed) {
                    return false;
                } catch (InterruptedException interrupted) {
                    Thread.currentThread().interrupt();
                    return false;
                }
            }

            @Override
            public Delivery next() {
                if (!hasNext()) throw new NoSuchElementException("the publisher has closed: hasNext() returns false");
                Delivery next = found;
                found = null;
                return next;
            }
        };
    }

    /**
     * After {@link PeltonException.PeerDied} or {@link PeltonException.Closed}: waits for the publisher's successor
     * under the same name, and joins it with the same options. Its messages count from 1, in a directory they continue.
     * Returns false if none has admitted it within {@code timeout}: the next call continues, so call it again, or close
     * the subscriber, which a successor may count already. Also a virtual thread waits in the library.
     */
    public boolean resume(Duration timeout) throws InterruptedException {
        long address = enter();
        try {
            int result = inSlices(Native.SUBSCRIBER_RESUME, address, Native.deadline(timeout));
            if (result < 0 && result != PeltonException.AGAIN) throw PeltonException.of(result);
            return result == PeltonException.OK;
        } finally {
            exit();
        }
    }

    /** Returns how many messages it has missed so far, also at the very end; with {@link Policy#LATEST}, skipped. */
    public long missed() {
        return figure(info -> info.get(JAVA_LONG, 56));
    }

    /** Returns whether it continues a durable subscription, and did not begin it. */
    public boolean continues() {
        return figure(info -> info.get(JAVA_INT, 12)) != 0;
    }

    /** Returns the subscriber's sizes, publisher and counters. Does not wait. */
    public Info info() {
        return figure(Info::ofSubscriber);
    }

    private <T> T figure(Function<MemorySegment, T> of) {
        return info(Native.SUBSCRIBER_GET_INFO, Info.SUBSCRIBER_BYTES, of);
    }

    /**
     * Returns the descriptor for an event loop, which it polls for reading while the subscriber is armed. It is
     * constant; do not read or close it.
     */
    public int fd() {
        return invoke(Native.SUBSCRIBER_FD);
    }

    /**
     * Makes the descriptor readable once there is a message, or the publisher has gone. Does not wait. Returns false if
     * there is a message now: receive first. Throws as {@link #receive()} when the publisher has gone.
     */
    public boolean arm() {
        return invoke(Native.SUBSCRIBER_ARM) == PeltonException.OK;
    }

    /** Ends what {@link #arm} began: when the descriptor is readable, before the messages are received. */
    public void disarm() {
        invoke(Native.SUBSCRIBER_DISARM);
    }
}
