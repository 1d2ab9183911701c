package pelton;

import static java.lang.foreign.ValueLayout.JAVA_BYTE;
import static java.lang.foreign.ValueLayout.JAVA_INT_UNALIGNED;
import static java.lang.foreign.ValueLayout.JAVA_LONG_UNALIGNED;

import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.nio.BufferOverflowException;
import java.nio.ByteBuffer;
import java.util.Objects;
import org.jspecify.annotations.Nullable;

/**
 * A message in the lane, as the handler of {@link Receiver#receive(Receiver.Handler)} gets it. The receiver reuses the
 * object, so the message is there only until the handler returns, on its thread: later uses throw {@link
 * IllegalStateException}. A sender that the receiver does not trust could change the bytes meanwhile: then copy first.
 *
 * <p>Numbers are little-endian.
 */
public final class Message {
    /** All memory: each access checks its offset against the message's size. */
    private static final MemorySegment MEMORY = MemorySegment.NULL.reinterpret(Long.MAX_VALUE);

    private final Receiver receiver;
    private long address;
    private long size;
    private int lane;
    private boolean isRedelivered;
    private @Nullable Arena arena;

    Message(Receiver receiver) {
        this.receiver = receiver;
    }

    void begin(long address, long size, int lane, boolean isRedelivered) {
        this.address = address;
        this.size = size;
        this.lane = lane;
        this.isRedelivered = isRedelivered;
    }

    void end() {
        address = 0;
        if (arena != null) {
            arena.close();
            arena = null;
        }
    }

    private long at(long offset, long bytes) {
        check();
        return address + Objects.checkFromIndexSize(offset, bytes, size);
    }

    private void check() {
        if (!receiver.isMine() || address == 0)
            throw new IllegalStateException(
                    "the message was released when its handler returned: copy what is needed later, by toArray()");
    }

    /** Returns the number of bytes. */
    public long size() {
        check();
        return size;
    }

    /** Returns the number of the sender, in the order of joining, from 1; 0 in a channel of one sender. */
    public int lane() {
        check();
        return lane;
    }

    /** Returns whether an earlier receiver may have received the message. */
    public boolean isRedelivered() {
        check();
        return isRedelivered;
    }

    /** Returns the span of which the message is a part, in W3C's text, or null. */
    public @Nullable String traceparent() {
        check();
        return receiver.handledTraceparent();
    }

    /** Returns the byte at the offset. */
    public byte getByte(long offset) {
        return MEMORY.get(JAVA_BYTE, at(offset, 1));
    }

    /** Returns the four bytes at the offset. */
    public int getInt(long offset) {
        return MEMORY.get(JAVA_INT_UNALIGNED, at(offset, 4));
    }

    /** Returns the eight bytes at the offset. */
    public long getLong(long offset) {
        return MEMORY.get(JAVA_LONG_UNALIGNED, at(offset, 8));
    }

    /** Copies {@code count} bytes from {@code offset} to an array. */
    public void copyTo(long offset, byte[] to, int toOffset, int count) {
        MemorySegment.copy(MEMORY, JAVA_BYTE, at(offset, count), to, toOffset, count);
    }

    /** Copies the message to the buffer. Throws {@link BufferOverflowException} if less than its bytes remain there. */
    public void copyTo(ByteBuffer to) {
        check();
        if (size > to.remaining()) throw new BufferOverflowException();
        if (to.hasArray()) {
            copyTo(0, to.array(), to.arrayOffset() + to.position(), (int) size);
            to.position(to.position() + (int) size);
        } else {
            to.put(segment().asByteBuffer());
        }
    }

    /** Returns a new array with the message's bytes. */
    public byte[] toArray() {
        check();
        byte[] bytes = new byte[Math.toIntExact(size)];
        copyTo(0, bytes, 0, bytes.length);
        return bytes;
    }

    /** Returns a new segment of the message's bytes, read-only, whose arena ends when the handler returns. */
    public MemorySegment segment() {
        check();
        if (arena == null) arena = Arena.ofConfined();
        return MemorySegment.ofAddress(address).reinterpret(size, arena, null).asReadOnly();
    }
}
