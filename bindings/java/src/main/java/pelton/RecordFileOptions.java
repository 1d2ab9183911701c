package pelton;

import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.ValueLayout;
import java.time.Duration;
import org.jspecify.annotations.Nullable;

/**
 * How to write a record file. {@code with} methods return changed copies.
 *
 * @param rotateBytes a write beyond this size begins a new file; the old one is renamed to PATH.000001 and so on. 0:
 *     never
 * @param syncBytes syncs to the disk after each such number of bytes, for which nothing waits; {@link #EACH_WRITE}:
 *     before a write counts as done. 0: not by size
 * @param syncInterval syncs so long after a write; null: not by time
 * @param flushBytes bytes of each appender's buffer, from 64 KiB to 1 GiB; 0: 1 MiB
 * @param flushInterval writes at the latest so long after an append; null: 100 ms
 */
public record RecordFileOptions(
        long rotateBytes,
        long syncBytes,
        @Nullable Duration syncInterval,
        long flushBytes,
        @Nullable Duration flushInterval) {
    /** One file, written after 1 MiB or 100 ms, and synced when it is closed. */
    public static final RecordFileOptions DEFAULTS = new RecordFileOptions(0, 0, null, 0, null);
    /** A value of {@code syncBytes}. */
    public static final long EACH_WRITE = -1;

    /** Returns a copy with this size of each file. */
    public RecordFileOptions withRotateBytes(long bytes) {
        return new RecordFileOptions(bytes, syncBytes, syncInterval, flushBytes, flushInterval);
    }

    /** Returns a copy that syncs after so many bytes. */
    public RecordFileOptions withSyncBytes(long bytes) {
        return new RecordFileOptions(rotateBytes, bytes, syncInterval, flushBytes, flushInterval);
    }

    /** Returns a copy that syncs so long after a write. */
    public RecordFileOptions withSyncInterval(Duration interval) {
        return new RecordFileOptions(rotateBytes, syncBytes, interval, flushBytes, flushInterval);
    }

    /** Returns a copy with buffers of so many bytes. */
    public RecordFileOptions withFlushBytes(long bytes) {
        return new RecordFileOptions(rotateBytes, syncBytes, syncInterval, bytes, flushInterval);
    }

    /** Returns a copy that writes so long after an append. */
    public RecordFileOptions withFlushInterval(Duration interval) {
        return new RecordFileOptions(rotateBytes, syncBytes, syncInterval, flushBytes, interval);
    }

    /** As {@code pelton_record_file_options}. */
    MemorySegment file(Arena arena) {
        MemorySegment options = arena.allocate(32, 8);
        options.set(ValueLayout.JAVA_INT, 0, 32);
        options.set(ValueLayout.JAVA_LONG, 8, rotateBytes);
        options.set(ValueLayout.JAVA_LONG, 16, syncBytes);
        options.set(ValueLayout.JAVA_LONG, 24, syncInterval == null ? 0 : syncInterval.toNanos());
        return options;
    }

    /** As {@code pelton_appenders_options}. */
    MemorySegment appenders(Arena arena) {
        MemorySegment options = arena.allocate(32, 8);
        options.set(ValueLayout.JAVA_INT, 0, 32);
        options.set(ValueLayout.JAVA_LONG, 8, flushBytes);
        options.set(ValueLayout.JAVA_LONG, 24, flushInterval == null ? 0 : flushInterval.toNanos());
        return options;
    }
}
