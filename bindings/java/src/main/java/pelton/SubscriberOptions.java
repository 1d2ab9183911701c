package pelton;

import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.ValueLayout;
import java.time.Duration;
import org.jspecify.annotations.Nullable;

/**
 * Options of a {@link Subscriber}. {@code with} methods return changed copies.
 *
 * @param connection how long to wait for a publisher, the largest lane and message that it accepts, the users that may
 *     be the publisher, and whether it never sleeps: its other options have no use here
 * @param policy what the publisher does when this subscriber falls behind
 * @param lagAfter with {@link Policy#GATE}: how long it holds the publisher up at one message, before it lags; null is
 *     no limit
 * @param slack bytes by which it may be behind, while it lags, before it misses messages; 0: 256 KiB
 * @param startFrom the first message: so many before the next one, or {@link #OLDEST}; of a durable subscription only
 *     its first subscriber begins there
 * @param durable in a directory: the subscription keeps its place under this name, over restarts of both sides; while
 *     no process uses the name, it counts by its policy; null: it ends with the subscriber
 */
public record SubscriberOptions(
        Options connection,
        Policy policy,
        @Nullable Duration lagAfter,
        long slack,
        long startFrom,
        @Nullable String durable) {
    /** Throws IllegalArgumentException for a negative number or time; {@link #OLDEST} is none. */
    public SubscriberOptions {
        if (lagAfter != null && lagAfter.isNegative())
            throw new IllegalArgumentException("lagAfter is " + lagAfter + ", wanted zero or more");
        if (slack < 0) throw new IllegalArgumentException("slack is " + slack + ", wanted 0 or more");
        if (startFrom < OLDEST)
            throw new IllegalArgumentException("startFrom is " + startFrom + ", wanted OLDEST, or 0 or more");
    }

    /** The publisher waits for it; it begins with the next message. */
    public static final SubscriberOptions DEFAULTS =
            new SubscriberOptions(Options.DEFAULTS, Policy.GATE, null, 0, 0, null);
    /** A value of {@code startFrom}: the oldest message that the publisher has. */
    public static final long OLDEST = -1;

    /** Returns a copy that connects so. */
    public SubscriberOptions withConnection(Options connection) {
        return new SubscriberOptions(connection, policy, lagAfter, slack, startFrom, durable);
    }

    /** Returns a copy with this policy. */
    public SubscriberOptions withPolicy(Policy policy) {
        return new SubscriberOptions(connection, policy, lagAfter, slack, startFrom, durable);
    }

    /** Returns a copy that lags after it has held the publisher up for so long. */
    public SubscriberOptions withLagAfter(Duration time) {
        return new SubscriberOptions(connection, policy, time, slack, startFrom, durable);
    }

    /** Returns a copy that may be behind by so many bytes. */
    public SubscriberOptions withSlack(long bytes) {
        return new SubscriberOptions(connection, policy, lagAfter, bytes, startFrom, durable);
    }

    /** Returns a copy that begins so many messages before the next one. */
    public SubscriberOptions withStartFrom(long messages) {
        return new SubscriberOptions(connection, policy, lagAfter, slack, messages, durable);
    }

    /** Returns a copy that keeps its place in a directory under this name. */
    public SubscriberOptions withDurable(String name) {
        return new SubscriberOptions(connection, policy, lagAfter, slack, startFrom, name);
    }

    /** As {@code pelton_subscriber_options}. */
    MemorySegment toNative(Arena arena) {
        MemorySegment options = arena.allocate(88, 8);
        Duration timeout = connection.timeout();
        options.set(ValueLayout.JAVA_INT, 0, 88);
        options.set(ValueLayout.JAVA_INT, 4, connection.spin() ? 1 : 0);
        options.set(ValueLayout.JAVA_LONG, 8, startFrom);
        if (lagAfter != null) options.set(ValueLayout.JAVA_LONG, 16, Math.max(1, Native.nanos(lagAfter)));
        options.set(ValueLayout.JAVA_LONG, 24, slack);
        options.set(ValueLayout.JAVA_LONG, 32, connection.capacity());
        options.set(ValueLayout.JAVA_LONG, 40, connection.messageBytesMax());
        options.set(ValueLayout.JAVA_LONG, 48, timeout == null ? 0 : Native.deadline(timeout));
        if (durable != null) options.set(ValueLayout.ADDRESS, 56, Native.text(durable, arena));
        connection.setUids(options, 64, arena);
        options.set(ValueLayout.JAVA_INT, 76, policy.ordinal());
        return options;
    }
}
