package pelton;

import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.nio.file.Path;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.locks.ReentrantLock;
import org.jspecify.annotations.Nullable;

/**
 * An open file: {@link Files#open}, which also says how its methods wait. Any number of threads use it; those that read
 * at its own position take turns, and so do those that write there.
 */
public final class File extends Handle {
    static final int CLOSE = 2, READ = 3, WRITE = 4, SYNC = 5, SYNC_DATA = 6;
    private static final long CURRENT = -1;
    /** Bytes of one read of a file of unknown size. A guess. */
    private static final int PIECE_BYTES = 256 << 10;

    private final Files files;
    private final Path path;
    private boolean isClosing;
    // The system does not order operations at a file's own position. Two, since a FIFO is read while it is written.
    private final ReentrantLock reading = new ReentrantLock(), writing = new ReentrantLock();

    File(Files files, long address, Path path) {
        super(address);
        this.files = files;
        this.path = path;
    }

    Files files() {
        return files;
    }

    /** Returns the path that was given to {@link Files#open}. */
    public Path path() {
        return path;
    }

    /** Reads {@code bytes} bytes at the file's position: fewer only at its end. */
    public byte[] read(int bytes) throws IOException, InterruptedException {
        reading.lockInterruptibly();
        try {
            return pread(bytes, CURRENT, false);
        } finally {
            reading.unlock();
        }
    }

    /** Reads everything from the file's position to its end. */
    public byte[] read() throws IOException, InterruptedException {
        reading.lockInterruptibly();
        try {
            ByteArrayOutputStream all = new ByteArrayOutputStream();
            byte[] piece;
            do {
                piece = pread(PIECE_BYTES, CURRENT, false);
                all.writeBytes(piece);
            } while (piece.length > 0);
            return all.toByteArray();
        } finally {
            reading.unlock();
        }
    }

    /** As {@link #read(int)}, without a wait. */
    public CompletableFuture<byte[]> readAsync(int bytes) {
        return Files.async(() -> read(bytes));
    }

    /** Reads {@code bytes} bytes from {@code offset} on: fewer only at the file's end. */
    public byte[] pread(int bytes, long offset) throws IOException, InterruptedException {
        return pread(bytes, offset, true);
    }

    private byte[] pread(int bytes, long offset, boolean isOffset) throws IOException, InterruptedException {
        if (bytes < 0 || isOffset && offset < 0)
            throw new IllegalArgumentException("bytes is " + bytes + ", offset " + offset + ": wanted 0 or more");
        Files.Operation read = new Files.Operation(READ, this);
        read.readBytes = bytes;
        read.offset = offset;
        return files.run(read, Files.Operation::read);
    }

    /** As {@link #pread}, without a wait. */
    public CompletableFuture<byte[]> preadAsync(int bytes, long offset) {
        return Files.async(() -> pread(bytes, offset));
    }

    /** Writes all bytes at the file's position, or at its end if it was opened to append. */
    public void write(byte[] bytes) throws IOException, InterruptedException {
        writing.lockInterruptibly();
        try {
            pwrite(bytes, CURRENT, false);
        } finally {
            writing.unlock();
        }
    }

    /** As {@link #write}, without a wait. The bytes must not change before the future has completed. */
    public CompletableFuture<@Nullable Void> writeAsync(byte[] bytes) {
        return Files.async(() -> {
            write(bytes);
            return null;
        });
    }

    /** Writes all bytes at {@code offset}. */
    public void pwrite(byte[] bytes, long offset) throws IOException, InterruptedException {
        pwrite(bytes, offset, true);
    }

    private void pwrite(byte[] bytes, long offset, boolean isOffset) throws IOException, InterruptedException {
        if (isOffset && offset < 0) throw new IllegalArgumentException("offset is " + offset + ", wanted 0 or more");
        Files.Operation write = new Files.Operation(WRITE, this);
        write.written = bytes;
        write.offset = offset;
        files.run(write, done -> done);
    }

    /** As {@link #pwrite}, without a wait. The bytes must not change before the future has completed. */
    public CompletableFuture<@Nullable Void> pwriteAsync(byte[] bytes, long offset) {
        return Files.async(() -> {
            pwrite(bytes, offset);
            return null;
        });
    }

    /** Waits until everything that was written is on the disk; with {@code dataOnly} without its times (fdatasync). */
    public void fsync(boolean dataOnly) throws IOException, InterruptedException {
        files.run(new Files.Operation(dataOnly ? SYNC_DATA : SYNC, this), done -> done);
    }

    /** As {@link #fsync}, without a wait. */
    public CompletableFuture<@Nullable Void> fsyncAsync(boolean dataOnly) {
        return Files.async(() -> {
            fsync(dataOnly);
            return null;
        });
    }

    /** Returns the file's length in bytes. */
    public long size() throws IOException, InterruptedException {
        return Files.stat(this, done -> done.length);
    }

    /** As {@link #size}, without a wait. */
    public CompletableFuture<Long> sizeAsync() {
        return Files.async(this::size);
    }

    /**
     * Closes the file; operations in flight are completed, and the last one closes it then. Closing it again does
     * nothing. Can wait for a file server, and reports no error of its own: {@link #fsync} does. Any thread.
     */
    @Override
    public void close() {
        files.close(this);
    }

    /** With the lock of {@link Files}, as is {@link #use}: returns whether this call is the first. */
    boolean beginClose() {
        boolean isFirst = !isClosing;
        isClosing = true;
        return isFirst;
    }

    /** The C handle, for an operation. */
    long use() {
        if (isClosing) throw new IllegalStateException("the File is closed: open another one");
        return address();
    }

    void closeNow() {
        super.close();
    }
}
