package pelton;

import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.ValueLayout;
import java.time.Duration;
import java.util.List;
import org.jspecify.annotations.Nullable;

/**
 * Options of endpoints. {@link #DEFAULTS} suits most channels; {@code with} methods return changed copies.
 *
 * @param capacity bytes of the lane, 64 MiB if 0, of calls 4 MiB. Memory is used only as needed
 * @param messageBytesMax bytes of the largest message, half of the capacity if 0
 * @param timeout how long opening waits for a listener, for a path's channel or its role; null does not wait for these
 * @param spin the endpoint never sleeps: the lowest latency, for a whole processor
 * @param create a path's channel is created if there is none
 * @param lanes the largest number of senders of a created path's channel, 1 if 0; of a gathering receiver, or of a
 *     service's clients, 1,024 if 0
 * @param callBytesMax bytes of the largest request that a service accepts, or reply that a client does, 64 MiB if 0
 * @param traced a sender's messages, or those of a created path's channel, may carry a traceparent; such a channel has
 *     no receiver of an earlier version
 * @param allowUids users that may be the peer, besides this process's own; a number beyond 2^31 is a negative int
 * @param memoryBytesMax limit of the memory that a receiver's peer can make it use, or all senders of a gathering
 *     receiver together, at least 1 MiB, or all clients of a service, at least 2 MiB; none if 0
 */
public record Options(
        long capacity,
        long messageBytesMax,
        @Nullable Duration timeout,
        boolean spin,
        boolean create,
        int lanes,
        long callBytesMax,
        boolean traced,
        List<Integer> allowUids,
        long memoryBytesMax) {
    /** Copies the list. */
    public Options {
        allowUids = List.copyOf(allowUids);
    }

    /** Lanes of 64 MiB, of calls 4 MiB, and no wait for the peer. */
    public static final Options DEFAULTS = new Options(0, 0, null, false, false, 0, 0, false, List.of(), 0);

    /** Returns a copy with this many bytes of the lane. */
    public Options withCapacity(long bytes) {
        return new Options(bytes, messageBytesMax, timeout, spin, create, lanes, callBytesMax, traced, allowUids, memoryBytesMax);
    }

    /** Returns a copy with this limit of a message. */
    public Options withMessageBytesMax(long bytes) {
        return new Options(capacity, bytes, timeout, spin, create, lanes, callBytesMax, traced, allowUids, memoryBytesMax);
    }

    /** Returns a copy that waits so long for its peer. */
    public Options withTimeout(Duration timeout) {
        return new Options(capacity, messageBytesMax, timeout, spin, create, lanes, callBytesMax, traced, allowUids, memoryBytesMax);
    }

    /** Returns a copy that never sleeps. */
    public Options withSpin(boolean spin) {
        return new Options(capacity, messageBytesMax, timeout, spin, create, lanes, callBytesMax, traced, allowUids, memoryBytesMax);
    }

    /** Returns a copy that creates a path's channel if there is none. */
    public Options withCreate(boolean create) {
        return new Options(capacity, messageBytesMax, timeout, spin, create, lanes, callBytesMax, traced, allowUids, memoryBytesMax);
    }

    /** Returns a copy with this number of senders of a created path's channel. */
    public Options withLanes(int lanes) {
        return new Options(capacity, messageBytesMax, timeout, spin, create, lanes, callBytesMax, traced, allowUids, memoryBytesMax);
    }

    /** Returns a copy with this limit of requests that a service accepts, or of replies that a client does. */
    public Options withCallBytesMax(long bytes) {
        return new Options(capacity, messageBytesMax, timeout, spin, create, lanes, bytes, traced, allowUids, memoryBytesMax);
    }

    /** Returns a copy that permits traceparents: see {@link Sender#sendTraced}. */
    public Options withTraced(boolean traced) {
        return new Options(capacity, messageBytesMax, timeout, spin, create, lanes, callBytesMax, traced, allowUids, memoryBytesMax);
    }

    /** Returns a copy that allows these users as peers. */
    public Options withAllowUids(Integer... uids) {
        return new Options(
                capacity, messageBytesMax, timeout, spin, create, lanes, callBytesMax, traced, List.of(uids), memoryBytesMax);
    }

    /** Returns a copy with this limit of the memory that peers can make an endpoint use. */
    public Options withMemoryBytesMax(long bytes) {
        return new Options(
                capacity, messageBytesMax, timeout, spin, create, lanes, callBytesMax, traced, allowUids, bytes);
    }

    /** As {@code pelton_channel_options}. */
    MemorySegment channel(Arena arena) {
        MemorySegment options = arena.allocate(80, 8);
        options.set(ValueLayout.JAVA_INT, 0, 80);
        options.set(ValueLayout.JAVA_INT, 4, spin ? 1 : 0);
        options.set(ValueLayout.JAVA_LONG, 8, capacity);
        options.set(ValueLayout.JAVA_LONG, 16, messageBytesMax);
        options.set(ValueLayout.JAVA_LONG, 32, memoryBytesMax);
        options.set(ValueLayout.JAVA_LONG, 40, timeout == null ? 0 : Native.deadline(timeout));
        setUids(options, 48, arena);
        options.set(ValueLayout.JAVA_INT, 60, create ? 1 : 0);
        options.set(ValueLayout.JAVA_INT, 68, lanes);
        options.set(ValueLayout.JAVA_INT, 72, traced ? 1 : 0);
        return options;
    }

    /** As {@code pelton_gather_options}. */
    MemorySegment gather(Arena arena) {
        MemorySegment options = arena.allocate(64, 8);
        options.set(ValueLayout.JAVA_INT, 0, 64);
        options.set(ValueLayout.JAVA_INT, 4, spin ? 1 : 0);
        options.set(ValueLayout.JAVA_LONG, 8, capacity);
        options.set(ValueLayout.JAVA_LONG, 16, messageBytesMax);
        options.set(ValueLayout.JAVA_LONG, 32, memoryBytesMax);
        setUids(options, 40, arena);
        options.set(ValueLayout.JAVA_INT, 52, lanes);
        return options;
    }

    /** As {@code pelton_client_options}. */
    MemorySegment client(Arena arena) {
        MemorySegment options = calls(arena, 80);
        options.set(ValueLayout.JAVA_LONG, 48, timeout == null ? 0 : Native.deadline(timeout));
        setUids(options, 64, arena);
        return options;
    }

    /** As {@code pelton_service_options}. */
    MemorySegment service(Arena arena) {
        MemorySegment options = calls(arena, 64);
        setUids(options, 48, arena);
        options.set(ValueLayout.JAVA_INT, 60, lanes);
        return options;
    }

    private MemorySegment calls(Arena arena, int bytes) {
        MemorySegment options = arena.allocate(bytes, 8);
        options.set(ValueLayout.JAVA_INT, 0, bytes);
        options.set(ValueLayout.JAVA_INT, 4, spin ? 1 : 0);
        options.set(ValueLayout.JAVA_LONG, 8, capacity);
        options.set(ValueLayout.JAVA_LONG, 16, messageBytesMax);
        options.set(ValueLayout.JAVA_LONG, 32, memoryBytesMax);
        options.set(ValueLayout.JAVA_LONG, 40, callBytesMax);
        return options;
    }

    /** The pointer and the number, one after the other in each of the structures. */
    void setUids(MemorySegment options, long at, Arena arena) {
        if (allowUids.isEmpty()) return;
        int[] uids = allowUids.stream().mapToInt(uid -> uid).toArray();
        options.set(ValueLayout.ADDRESS, at, arena.allocateFrom(ValueLayout.JAVA_INT, uids));
        options.set(ValueLayout.JAVA_INT, at + 8, uids.length);
    }
}
