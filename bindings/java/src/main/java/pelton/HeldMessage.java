package pelton;

import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.ref.Reference;
import java.nio.ByteBuffer;

/**
 * A message in the lane, from {@link Receiver#receiveHeld()}, until it is closed: later uses throw {@link
 * IllegalStateException}. Only the thread that received it reads and closes it. About 300 bytes are allocated for each.
 *
 * <p>A sender that the receiver does not trust could change the bytes meanwhile: then copy first.
 */
public final class HeldMessage extends Handle {
    private final Arena arena = Arena.ofConfined();
    private final MemorySegment segment;

    /** The library keeps that many bytes at {@code data} until the handle is closed. */
    HeldMessage(long address, long data, long size) {
        super(address);
        // The arena's end does nothing but to keep this object as long as the segment: what is garbage is closed.
        segment = MemorySegment.ofAddress(data)
                .reinterpret(size, arena, ended -> Reference.reachabilityFence(this))
                .asReadOnly();
    }

    private HeldMessage(Message message) {
        super(0);
        MemorySegment copy = arena.allocate(message.size());
        MemorySegment.copy(message.segment(), 0, copy, 0, message.size());
        segment = copy.asReadOnly();
    }

    static HeldMessage ofCopy(Message message) {
        return new HeldMessage(message);
    }

    /** Returns the message's bytes, read-only: always the same segment, whose arena ends when this is closed. */
    public MemorySegment segment() {
        return segment;
    }

    /** Returns a new buffer of {@link #segment}. */
    public ByteBuffer buffer() {
        return segment.asByteBuffer();
    }

    /** Releases the message. Does not wait. Closing it again does nothing. */
    @Override
    public void close() {
        if (arena.scope().isAlive()) arena.close();
        super.close();
    }
}
