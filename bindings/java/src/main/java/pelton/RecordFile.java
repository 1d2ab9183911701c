package pelton;

import static java.lang.foreign.ValueLayout.JAVA_LONG;

import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.invoke.MethodHandle;
import java.nio.file.Path;

/**
 * Appends messages to a file, which {@link RecordReader} and {@code pelton cat} read. It collects messages, and writes
 * them together. What is written survives this process; it survives a failure of the machine after {@link #sync}, or as
 * the options say. A failed write has no effect, and can be tried again.
 *
 * <p>If another program renames, deletes or truncates the file, as logrotate does, the next write continues in the file
 * at the path. Any number of threads use it; {@link #appender} is for a thread that appends much. A write keeps the
 * carrier of a virtual thread.
 */
public final class RecordFile extends LockedHandle {
    private final Appender own;

    private RecordFile(long address) {
        super(address);
        try {
            own = appender();
        } catch (Throwable failure) {
            super.close();
            throw failure;
        }
    }

    /**
     * Opens a record file to append to, or creates it with mode 0640. It cuts off the torn end that a killed writer
     * left. Waits up to a second while another writer has the file, as a killed process keeps it for a moment. Throws
     * {@link PeltonException}: another writer has the file, it is damaged in the middle, or is no record file.
     */
    public static RecordFile open(Path path, RecordFileOptions options) {
        try (Arena arena = Arena.ofConfined()) {
            MemorySegment out = arena.allocate(8, 8);
            PeltonException.check((int) Native.APPENDERS_TO_RECORD_FILE.invokeExact(
                    arena.allocateFrom(path.toString()), options.file(arena), options.appenders(arena), out));
            return new RecordFile(out.get(JAVA_LONG, 0));
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        }
    }

    /** As {@link #open(Path, RecordFileOptions)} with {@link RecordFileOptions#DEFAULTS}. */
    public static RecordFile open(Path path) {
        return open(path, RecordFileOptions.DEFAULTS);
    }

    /**
     * Appends a message to a buffer that the threads share, one after the other: their messages are in the file in the
     * order of these calls. Waits for other threads' calls, and for the file when the buffer is full. Throws as {@link
     * Appender#append(MemorySegment)}.
     */
    public void append(byte[] message) {
        lock.lock();
        try {
            own.append(message);
        } finally {
            unlock();
        }
    }

    /**
     * Creates an appender with a buffer of its own, for one thread at a time: the fastest way to append. Up to 1,024
     * are open at a time. Close it before or after the file.
     */
    public Appender appender() {
        lock.lock();
        try (Arena arena = Arena.ofConfined()) {
            MemorySegment out = arena.allocate(8, 8);
            PeltonException.check((int) Native.APPENDERS_APPENDER.invokeExact(address(), out));
            return new Appender(out.get(JAVA_LONG, 0));
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        } finally {
            unlock();
        }
    }

    /** Writes everything that was appended, by any appender. Waits for the file. Throws {@link PeltonException}. */
    public void flush() {
        call(Native.APPENDERS_FLUSH);
    }

    /** As {@link #flush}; then everything is on the disk. */
    public void sync() {
        call(Native.APPENDERS_SYNC);
    }

    private void call(MethodHandle function) {
        lock.lock();
        try {
            PeltonException.check((int) function.invokeExact(address()));
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        } finally {
            unlock();
        }
    }

    /**
     * Syncs and closes the file; open appenders keep it open. It is closed also if the sync throws, and then messages
     * may be missing in the file.
     */
    @Override
    public void close() {
        lock.lock();
        try {
            if (!isOpen()) return;
            try {
                sync();
            } finally {
                try {
                    own.close();
                } finally {
                    super.close();
                }
            }
        } finally {
            unlock();
        }
    }
}
