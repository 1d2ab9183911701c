package pelton;

import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.ValueLayout;
import java.time.Duration;
import org.jspecify.annotations.Nullable;

/**
 * Options of a {@link Publisher}. {@code with} methods return changed copies.
 *
 * @param lane the sizes, the users that may subscribe, whether it never sleeps, and in a directory how long to wait
 *     while another publisher is alive: its other options have no use here
 * @param history messages kept for subscribers that join later, as far as they fit into half the capacity
 * @param holdMax how long one subscriber may hold the publisher up at one message: one that could do so for longer is
 *     refused, and with zero each must lag; null is no limit. In a directory the limit stays until the next publisher
 *     begins, and a publisher that has a subscription beyond its own, also one that no process uses, is refused
 */
public record PublisherOptions(Options lane, long history, @Nullable Duration holdMax) {
    /** Throws IllegalArgumentException for a negative number or time. */
    public PublisherOptions {
        if (history < 0) throw new IllegalArgumentException("history is " + history + ", wanted 0 or more");
        if (holdMax != null && holdMax.isNegative())
            throw new IllegalArgumentException("holdMax is " + holdMax + ", wanted zero or more");
    }

    /** A lane of 64 MiB, no history, and any subscriber. */
    public static final PublisherOptions DEFAULTS = new PublisherOptions(Options.DEFAULTS, 0, null);

    /** Returns a copy with these sizes. */
    public PublisherOptions withLane(Options lane) {
        return new PublisherOptions(lane, history, holdMax);
    }

    /** Returns a copy that keeps so many messages. */
    public PublisherOptions withHistory(long messages) {
        return new PublisherOptions(lane, messages, holdMax);
    }

    /** Returns a copy that one subscriber may hold up for so long. */
    public PublisherOptions withHoldMax(Duration time) {
        return new PublisherOptions(lane, history, time);
    }

    /** As {@code pelton_publisher_options}. */
    MemorySegment toNative(Arena arena) {
        MemorySegment options = arena.allocate(64, 8);
        Duration timeout = lane.timeout();
        options.set(ValueLayout.JAVA_INT, 0, 64);
        options.set(ValueLayout.JAVA_INT, 4, lane.spin() ? 1 : 0);
        options.set(ValueLayout.JAVA_LONG, 8, lane.capacity());
        options.set(ValueLayout.JAVA_LONG, 16, lane.messageBytesMax());
        options.set(ValueLayout.JAVA_LONG, 24, history);
        // PELTON_NO_HOLD.
        if (holdMax != null) options.set(ValueLayout.JAVA_LONG, 32, holdMax.isZero() ? -1 : Native.nanos(holdMax));
        options.set(ValueLayout.JAVA_LONG, 40, timeout == null ? 0 : Native.deadline(timeout));
        lane.setUids(options, 48, arena);
        return options;
    }
}
