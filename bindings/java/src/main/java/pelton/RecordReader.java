package pelton;

import static java.lang.foreign.ValueLayout.ADDRESS;
import static java.lang.foreign.ValueLayout.JAVA_BYTE;
import static java.lang.foreign.ValueLayout.JAVA_LONG;

import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.nio.file.Path;
import java.util.Iterator;
import java.util.NoSuchElementException;
import org.jspecify.annotations.Nullable;

/**
 * Reads a record file, compressed or not, in the order of writing; each message's checksum is verified. A writer may
 * continue meanwhile. One thread at a time uses it.
 */
public final class RecordReader extends Handle implements Iterable<byte[]> {
    private final MemorySegment record = Arena.ofAuto().allocate(48, 8);

    private RecordReader(long address) {
        super(address);
    }

    /** Opens the file at the path. Throws {@link PeltonException}: there is none, or it is no record file. */
    public static RecordReader open(Path path) {
        try (Arena arena = Arena.ofConfined()) {
            MemorySegment out = arena.allocate(8, 8);
            PeltonException.check(
                    (int) Native.RECORDS_OPEN.invokeExact(arena.allocateFrom(path.toString()), out));
            return new RecordReader(out.get(JAVA_LONG, 0));
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        }
    }

    /**
     * Returns the next message, or null at the end of the file; a later call returns what a writer has added. Throws
     * {@link PeltonException} with code -32 where a damaged part was skipped, after which the next call continues, and
     * with -33 where the end is torn, as a killed writer leaves it.
     */
    public byte @Nullable [] next() {
        long address = enter();
        try {
            int result = (int) Native.RECORDS_NEXT.invokeExact(address, record);
            if (result == PeltonException.AGAIN) return null;
            PeltonException.check(result);
            // The library keeps that many bytes there until the next call.
            return record.get(ADDRESS, 0).reinterpret(record.get(JAVA_LONG, 8)).toArray(JAVA_BYTE);
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        } finally {
            exit();
        }
    }

    /** Iterates over the messages that are not read yet, up to the end of the file. Throws as {@link #next}. */
    @Override
    public Iterator<byte[]> iterator() {
        return new Iterator<>() {
            private byte @Nullable [] message;

            @Override
            public boolean hasNext() {
                if (message == null) message = RecordReader.this.next();
                return message != null;
            }

            @Override
            public byte[] next() {
                if (!hasNext()) throw new NoSuchElementException("the file has ended: hasNext() returns false");
                byte[] next = message;
                message = null;
                return next;
            }
        };
    }
}
