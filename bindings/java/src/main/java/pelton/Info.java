package pelton;

import static java.lang.foreign.ValueLayout.JAVA_INT;
import static java.lang.foreign.ValueLayout.JAVA_LONG;

import java.lang.foreign.MemorySegment;
import org.jspecify.annotations.Nullable;

/**
 * The sizes, the peer and the counters of an endpoint, as {@link Sender#info}, {@link Receiver#info}, {@link
 * Publisher#info} and {@link Subscriber#info} return them.
 *
 * @param capacity bytes of the lane
 * @param messageBytesMax bytes of the largest message
 * @param peer the process of the other endpoint, or null: none is connected as far as known, or it is a publisher's
 * @param unreleased of a sender: messages that the receiver has not released; otherwise 0
 * @param messages messages sent, or released; those of a batch when it is received
 * @param bytes bytes of their payload
 * @param waits how often there was no space, or no message
 * @param sleeps how often it then slept, or armed its descriptor
 * @param wakesSent how often it woke a peer
 */
public record Info(
        long capacity,
        long messageBytesMax,
        @Nullable Peer peer,
        long unreleased,
        long messages,
        long bytes,
        long waits,
        long sleeps,
        long wakesSent) {
    /**
     * The process of the other endpoint.
     *
     * @param pid its number; of a thread, that of this process
     * @param uid its user, unsigned
     */
    public record Peer(int pid, int uid) {}

    static final int SENDER_BYTES = 96, RECEIVER_BYTES = 80, PUBLISHER_BYTES = 80, SUBSCRIBER_BYTES = 88;

    static Info ofSender(MemorySegment info) {
        return of(info, 24, peer(info, 4, 8), info.get(JAVA_LONG, 40), 56, 72);
    }

    static Info ofReceiver(MemorySegment info) {
        return of(info, 24, peer(info, 4, 8), 0, 40, 56);
    }

    static Info ofPublisher(MemorySegment info) {
        return of(info, 16, null, 0, 40, 56);
    }

    static Info ofSubscriber(MemorySegment info) {
        // A process is never 0.
        return of(info, 24, peer(info, 4, 4), 0, 40, 64);
    }

    private static @Nullable Peer peer(MemorySegment info, long hasPeer, long pid) {
        return info.get(JAVA_INT, hasPeer) == 0 ? null : new Peer(info.get(JAVA_INT, pid), info.get(JAVA_INT, pid + 4));
    }

    /** Of a C structure, by the offsets of {@code capacity}, {@code messages} and {@code waits}. */
    private static Info of(
            MemorySegment info, long capacity, @Nullable Peer peer, long unreleased, long messages, long waits) {
        return new Info(
                info.get(JAVA_LONG, capacity),
                info.get(JAVA_LONG, capacity + 8),
                peer,
                unreleased,
                info.get(JAVA_LONG, messages),
                info.get(JAVA_LONG, messages + 8),
                info.get(JAVA_LONG, waits),
                info.get(JAVA_LONG, waits + 8),
                info.get(JAVA_LONG, waits + 16));
    }
}
