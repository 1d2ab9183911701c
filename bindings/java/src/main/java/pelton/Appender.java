package pelton;

import static java.lang.foreign.ValueLayout.ADDRESS;

import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;

/**
 * Appends to a record file, by a buffer of its own. One thread at a time uses it. What it has appended is in the file
 * in this order, and is written later also after it is closed. See {@link RecordFile#appender}.
 */
public final class Appender extends Handle {
    private final MemorySegment out = Arena.ofAuto().allocate(8, 8);

    Appender(long address) {
        super(address);
    }

    /** As {@link #append(MemorySegment)}. */
    public void append(byte[] message) {
        append(MemorySegment.ofArray(message));
    }

    /**
     * Copies a message into the buffer. Waits only for the file, when the buffer is full. Throws {@link
     * PeltonException.TooLarge} beyond the buffer, and the {@link PeltonException} of a write: then this message was
     * not appended, and earlier ones are kept.
     */
    public void append(MemorySegment message) {
        long address = enter(), size = message.byteSize();
        try {
            PeltonException.check((int) Native.APPENDER_RESERVE.invokeExact(address, size, out));
            // The library has reserved that many bytes there.
            try {
                MemorySegment.copy(message, 0, out.get(ADDRESS, 0).reinterpret(size), 0, size);
            } catch (Throwable failure) {
                int ignored = (int) Native.APPENDER_ABORT.invokeExact(address);
                throw failure;
            }
            PeltonException.check((int) Native.APPENDER_COMMIT.invokeExact(address, size));
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        } finally {
            exit();
        }
    }

    /**
     * Closes the appender: what it has appended is written later. Does not wait, unless the file is closed already and
     * this is the last of its appenders: then it writes and syncs everything, and reports no error. Call {@link
     * RecordFile#sync} before. Closing it again does nothing.
     */
    @Override
    public void close() {
        super.close();
    }
}
