package pelton;

import static java.lang.foreign.ValueLayout.ADDRESS;
import static java.lang.foreign.ValueLayout.JAVA_BYTE;
import static java.lang.foreign.ValueLayout.JAVA_INT;
import static java.lang.foreign.ValueLayout.JAVA_LONG;

import java.io.IOException;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.ref.Reference;
import java.nio.channels.AsynchronousCloseException;
import java.nio.charset.StandardCharsets;
import java.nio.file.AccessDeniedException;
import java.nio.file.FileAlreadyExistsException;
import java.nio.file.FileSystemException;
import java.nio.file.LinkOption;
import java.nio.file.NoSuchFileException;
import java.nio.file.NotDirectoryException;
import java.nio.file.OpenOption;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.concurrent.Callable;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Semaphore;
import java.util.concurrent.locks.LockSupport;
import java.util.concurrent.locks.ReentrantLock;
import org.jspecify.annotations.Nullable;

/**
 * Reads and writes files by io_uring, or by the library's threads where the system refuses that. What the page cache
 * has is done within the call; else the calling thread parks, and a virtual one gives up its carrier. Any number of
 * threads use it: up to 1,024 operations are in flight, and a further one waits for its turn.
 *
 * <p>An interrupt cancels the operation and ends the wait with {@link InterruptedException}; it can still take effect.
 * So does {@link CompletableFuture#cancel} with the methods named Async, which run on a virtual thread of their own.
 * Errors of the system are those of {@link java.nio.file.Files}, such as {@link NoSuchFileException}; before an error,
 * a part of the bytes can have been read or written.
 */
public final class Files extends Handle {
    private static final int OPEN = 1, TRUNCATE = 7, STAT = 9, LIST = 19, COPY = 20;
    private static final int IN_FLIGHT_MAX = 1024;
    private static final int OPERATION_BYTES = 160, COMPLETION_BYTES = 56, STAT_BYTES = 88, IOVEC_BYTES = 16;
    private static final int TAKEN_MAX = 64;
    /** When the library lacks memory or threads to start an operation: a guess. */
    private static final long RETRY_NS = 10_000_000;

    private static final boolean IS_X86 = System.getProperty("os.arch").equals("amd64");
    private static final int O_DIRECTORY = IS_X86 ? 0x10000 : 0x4000, O_NOFOLLOW = IS_X86 ? 0x20000 : 0x8000;
    private static final int O_WRONLY = 1, O_RDWR = 2, O_CREAT = 0x40, O_EXCL = 0x80, O_TRUNC = 0x200, O_APPEND = 0x400;
    private static final int O_DSYNC = 0x1000, O_SYNC = 0x101000;

    /** Orders every use of the C handle, and guards everything below. Nobody waits for a completion with it. */
    private final ReentrantLock lock = new ReentrantLock();
    private final MemorySegment memory =
            Arena.ofAuto().allocate(OPERATION_BYTES + 8 + TAKEN_MAX * COMPLETION_BYTES, 8);
    private final MemorySegment operation = memory.asSlice(0, OPERATION_BYTES);
    private final MemorySegment outCount = memory.asSlice(OPERATION_BYTES, 8);
    private final MemorySegment completions = memory.asSlice(OPERATION_BYTES + 8);
    private final HashMap<Long, Operation> operations = new HashMap<>();
    private long tokens;
    /** The wait of the virtual thread that takes completions while operations are in flight. */
    private Poller.@Nullable Interest taker;
    private boolean mustRetry;

    private final Semaphore places = new Semaphore(IN_FLIGHT_MAX, true);

    /** One operation: what its kind uses, then its result. */
    static final class Operation {
        final int kind;
        final List<Path> paths;
        @Nullable File file, to;
        @Nullable Path path;
        byte @Nullable [] written;
        int readBytes, openFlags;
        long offset, bytes;

        private final Thread thread = Thread.currentThread();
        /** An iovec, and the bytes to which it points: the library's until the completion was taken. */
        private MemorySegment memory = MemorySegment.NULL;
        /** The caller has left: the thread that takes the completion frees everything. Guarded by the lock. */
        private boolean isAbandoned;
        private volatile boolean isDone;
        private boolean isClosed;
        private long token;
        private int code, error;
        /** The C handle of the file that was opened. */
        long opened;
        long count;
        /** Of STAT: the length, and the numbers that two names of one file share. */
        long length, inode, device;
        byte[] text = {};
        private @Nullable Throwable failure;

        Operation(int kind, List<Path> paths) {
            this.kind = kind;
            this.paths = paths;
        }

        Operation(int kind, File file) {
            this(kind, List.of(file.path()));
            this.file = file;
        }

        /** The bytes that were read. */
        byte[] read() {
            return memory.asSlice(IOVEC_BYTES, count).toArray(JAVA_BYTE);
        }

        private void allocate() {
            int size = written != null ? written.length : readBytes;
            memory = Native.allocate(IOVEC_BYTES + (long) size);
            memory.set(JAVA_LONG, 0, memory.address() + IOVEC_BYTES);
            memory.set(JAVA_LONG, 8, size);
            if (written != null) MemorySegment.copy(written, 0, memory, JAVA_BYTE, IOVEC_BYTES, size);
        }

        private void free() {
            Native.free(memory);
            memory = MemorySegment.NULL;
        }
    }

    @FunctionalInterface
    interface Result<T extends @Nullable Object> {
        T of(Operation operation);
    }

    /** Opens no file yet. Paths are the process's. Throws {@link PeltonException}: the system lacks memory. */
    public Files() {
        super(engine(null));
    }

    /**
     * As {@link #Files()}. No path leads out of {@code root}, whatever "..", absolute paths and symbolic links say:
     * these throw {@link FileSystemException}.
     */
    public Files(Path root) {
        super(engine(root));
    }

    private static long engine(@Nullable Path root) {
        try (Arena arena = Arena.ofConfined()) {
            MemorySegment options = arena.allocate(24, 8), out = arena.allocate(8, 8);
            options.set(JAVA_INT, 0, 24);
            options.set(JAVA_INT, 4, IN_FLIGHT_MAX);
            if (root != null) options.set(ADDRESS, 16, arena.allocateFrom(root.toString()));
            PeltonException.check((int) Native.ENGINE_OPEN.invokeExact(options, out));
            return out.get(JAVA_LONG, 0);
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        }
    }

    /**
     * Opens a file, by default to read. Options are those of {@link StandardOpenOption}, without DELETE_ON_CLOSE, and
     * {@link LinkOption#NOFOLLOW_LINKS}. Opening a FIFO waits for its other end. A new file has mode 0666, less the
     * umask.
     */
    public File open(Path path, OpenOption... options) throws IOException, InterruptedException {
        return open(path, flags(options));
    }

    private File open(Path path, int flags) throws IOException, InterruptedException {
        Operation open = new Operation(OPEN, List.of(path));
        open.path = path;
        open.openFlags = flags;
        return run(open, done -> new File(this, done.opened, path));
    }

    /** As {@link #open}, without a wait. */
    public CompletableFuture<File> openAsync(Path path, OpenOption... options) {
        return async(() -> open(path, options));
    }

    /** Returns all bytes of a file. */
    public byte[] readFile(Path path) throws IOException, InterruptedException {
        try (File file = open(path)) {
            long size = file.size();
            if (size > Integer.MAX_VALUE - IOVEC_BYTES)
                throw new OutOfMemoryError(path + " has " + size + " bytes, and an array less than 2 GiB: use pread()");
            // Files of /proc have no size.
            return size > 0 ? file.pread((int) size, 0) : file.read();
        }
    }

    /** As {@link #readFile}, without a wait. */
    public CompletableFuture<byte[]> readFileAsync(Path path) {
        return async(() -> readFile(path));
    }

    /** Creates or replaces a file with these bytes. Not atomic, and not synced. */
    public void writeFile(Path path, byte[] bytes) throws IOException, InterruptedException {
        try (File file = open(path, O_WRONLY | O_CREAT | O_TRUNC)) {
            file.write(bytes);
        }
    }

    /** As {@link #writeFile}, without a wait. The bytes must not change before the future has completed. */
    public CompletableFuture<@Nullable Void> writeFileAsync(Path path, byte[] bytes) {
        return async(() -> {
            writeFile(path, bytes);
            return null;
        });
    }

    /**
     * Copies a file's bytes within the kernel, creates or replaces {@code target}, and returns their number. Throws
     * {@link FileSystemException} if both are one file, which the copy would empty.
     */
    public long copy(Path source, Path target) throws IOException, InterruptedException {
        try (File from = open(source); File to = open(target, O_WRONLY | O_CREAT)) {
            Operation there = stat(from, done -> done), here = stat(to, done -> done);
            if (there.inode == here.inode && there.device == here.device)
                throw new FileSystemException(
                        source.toString(),
                        target.toString(),
                        "source and target are one file, which the copy would empty");
            run(new Operation(TRUNCATE, to), done -> done);
            Operation copy = new Operation(COPY, List.of(source, target));
            copy.file = from;
            copy.to = to;
            copy.bytes = Long.MAX_VALUE;
            return run(copy, done -> done.count);
        }
    }

    /** As {@link #copy}, without a wait. */
    public CompletableFuture<Long> copyAsync(Path source, Path target) {
        return async(() -> copy(source, target));
    }

    /** Returns the names in a directory, in any order, without "." and "..". */
    public List<String> list(Path directory) throws IOException, InterruptedException {
        List<String> names = new ArrayList<>();
        try (File file = open(directory, O_DIRECTORY)) {
            while (true) {
                byte[] text = run(new Operation(LIST, file), done -> done.text);
                if (text.length == 0) return names;
                // Of each entry: its inode, its kind, and its name, which ends with a 0.
                for (int at = 0; at < text.length; ) {
                    int begin = at + 9, end = begin;
                    while (text[end] != 0) end++;
                    names.add(new String(text, begin, end - begin, StandardCharsets.UTF_8));
                    at = end + 1;
                }
            }
        }
    }

    /** As {@link #list}, without a wait. */
    public CompletableFuture<List<String>> listAsync(Path directory) {
        return async(() -> list(directory));
    }

    /**
     * Cancels what is in flight, which throws {@link AsynchronousCloseException}. Waits until the system no longer uses
     * its memory. Open files remain open: close them, too. Any thread.
     */
    @Override
    public void close() {
        lock.lock();
        try {
            if (!isOpen()) return;
            super.close();
            for (Operation operation : operations.values()) {
                operation.isClosed = true;
                end(operation);
            }
            operations.clear();
            if (taker != null) taker.wake();
        } finally {
            lock.unlock();
        }
    }

    /** From now on no operation begins with the file. Those in flight have it by themselves. */
    void close(File file) {
        lock.lock();
        try {
            if (!file.beginClose()) return;
        } finally {
            lock.unlock();
        }
        // Without the lock, since it can wait.
        file.closeNow();
    }

    static <T extends @Nullable Object> T stat(File file, Result<T> result) throws IOException, InterruptedException {
        return file.files().run(new Operation(STAT, file), result);
    }

    /** Runs a task on a virtual thread, which a cancellation of the future interrupts. */
    static <T extends @Nullable Object> CompletableFuture<T> async(Callable<T> task) {
        Thread[] runner = new Thread[1];
        CompletableFuture<T> future = new CompletableFuture<>() {
            @Override
            public boolean cancel(boolean mayInterruptIfRunning) {
                boolean isCancelled = super.cancel(mayInterruptIfRunning);
                if (isCancelled) runner[0].interrupt();
                return isCancelled;
            }
        };
        runner[0] = Thread.ofVirtual().unstarted(() -> {
            try {
                T result = task.call();
                // A file that nobody gets.
                if (!future.complete(result) && result instanceof File file) file.close();
            } catch (Throwable failure) {
                future.completeExceptionally(failure);
            }
        });
        runner[0].start();
        return future;
    }

    private static int flags(OpenOption... options) {
        boolean isRead = false, isWritten = false;
        int flags = 0;
        for (OpenOption option : options) {
            if (option == LinkOption.NOFOLLOW_LINKS) {
                flags |= O_NOFOLLOW;
                continue;
            }
            if (!(option instanceof StandardOpenOption standard))
                throw new UnsupportedOperationException("option " + option + ": wanted those of StandardOpenOption");
            switch (standard) {
                case READ -> isRead = true;
                case WRITE -> isWritten = true;
                case APPEND -> {
                    isWritten = true;
                    flags |= O_APPEND;
                }
                case TRUNCATE_EXISTING -> flags |= O_TRUNC;
                case CREATE -> flags |= O_CREAT;
                case CREATE_NEW -> flags |= O_CREAT | O_EXCL;
                case SYNC -> flags |= O_SYNC;
                case DSYNC -> flags |= O_DSYNC;
                case SPARSE -> {}
                case DELETE_ON_CLOSE -> throw new UnsupportedOperationException(
                        "DELETE_ON_CLOSE is not offered: delete the file after it was closed");
            }
        }
        // As the JDK: these have no effect on a file that is only read.
        if (!isWritten) return flags & ~(O_CREAT | O_EXCL | O_TRUNC);
        return flags | (isRead ? O_RDWR : O_WRONLY);
    }

    /** Submits an operation, and waits for it. Returns what {@code result} makes of a successful one. */
    <T extends @Nullable Object> T run(Operation operation, Result<T> result) throws IOException, InterruptedException {
        places.acquire();
        boolean isSubmitted = false;
        try {
            operation.allocate();
            lock.lock();
            try {
                submit(operation);
                isSubmitted = true;
                settle();
            } catch (Throwable failure) {
                operation.isAbandoned = isSubmitted && !operation.isDone;
                throw failure;
            } finally {
                lock.unlock();
            }
            await(operation);
            check(operation);
            return result.of(operation);
        } finally {
            if (!isSubmitted) places.release();
            if (!operation.isAbandoned) operation.free();
            Reference.reachabilityFence(this);
        }
    }

    private void await(Operation operation) throws InterruptedException {
        while (!operation.isDone) {
            if (!Thread.interrupted()) {
                LockSupport.park(this);
                continue;
            }
            lock.lock();
            try {
                if (operation.isDone) {
                    Thread.currentThread().interrupt();
                    return;
                }
                operation.isAbandoned = true;
                // It is in flight: it completes, cancelled or not.
                int ignored = (int) Native.ENGINE_CANCEL.invokeExact(address(), operation.token);
                settle();
            } catch (Throwable failure) {
                throw Native.unexpected(failure);
            } finally {
                lock.unlock();
            }
            throw new InterruptedException();
        }
    }

    private void check(Operation done) throws IOException {
        if (done.isClosed) throw new AsynchronousCloseException();
        if (done.failure != null) throw Native.unexpected(done.failure);
        if (done.error != 0) throw error(done.error, done.paths);
        if (done.code < 0) throw PeltonException.of(done.code, Native.codeText(done.code));
    }

    private static IOException error(int error, List<Path> paths) {
        String path = paths.get(0).toString(), other = paths.size() > 1 ? paths.get(1).toString() : null;
        return switch (error) {
            case 2 -> new NoSuchFileException(path, other, null);
            case 13 -> new AccessDeniedException(path, other, null);
            case 17 -> new FileAlreadyExistsException(path, other, null);
            case 20 -> new NotDirectoryException(path);
            default -> new FileSystemException(path, other, Native.systemText(error));
        };
    }

    // ---- With the lock ------------------------------------------------------------------------------------------

    private void submit(Operation it) {
        it.token = ++tokens;
        operations.put(it.token, it);
        boolean isAccepted = false;
        try (Arena arena = Arena.ofConfined()) {
            operation.fill((byte) 0);
            operation.set(JAVA_LONG, 0, it.token);
            operation.set(JAVA_INT, 8, it.kind);
            operation.set(JAVA_LONG, 16, it.file == null ? 0 : it.file.use());
            operation.set(JAVA_LONG, 24, it.to == null ? 0 : it.to.use());
            if (it.path != null) operation.set(ADDRESS, 32, arena.allocateFrom(it.path.toString()));
            if (it.kind == File.READ || it.kind == File.WRITE) {
                operation.set(ADDRESS, 48, it.memory);
                operation.set(JAVA_LONG, 56, 1);
            }
            operation.set(JAVA_LONG, 64, it.offset);
            operation.set(JAVA_LONG, 80, it.bytes);
            operation.set(JAVA_INT, 88, it.openFlags);
            operation.set(JAVA_INT, 92, 0666);
            outCount.set(JAVA_LONG, 0, 0);
            int result = (int) Native.ENGINE_SUBMIT.invokeExact(address(), operation, 1L, outCount);
            // One that was accepted is in flight, even if it cannot be started now.
            isAccepted = outCount.get(JAVA_LONG, 0) == 1;
            if (!isAccepted) throw PeltonException.of(result);
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        } finally {
            if (!isAccepted) operations.remove(it.token);
        }
    }

    /** Takes what is complete, and has the descriptor announce the rest to the taker. */
    private void settle() {
        try {
            int armed;
            do {
                take();
                if (operations.isEmpty()) {
                    if (taker != null) taker.wake();
                    return;
                }
                armed = (int) Native.ENGINE_ARM.invokeExact(address());
            } while (armed == PeltonException.READY);
            mustRetry = armed != PeltonException.OK;
            if (taker == null) {
                taker = interest(Native.ENGINE_FD, address());
                Thread.ofVirtual().name("pelton-files").start(this::takeAll);
            } else if (mustRetry) {
                taker.wake();
            }
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        }
    }

    /** The taker's thread. It ends when nothing is in flight, so it does not keep a forgotten object. */
    private void takeAll() {
        while (true) {
            Poller.Interest wait;
            long untilNs = Native.FOREVER;
            lock.lock();
            try {
                if (isOpen()) settle();
                wait = taker;
                if (operations.isEmpty() || wait == null) {
                    taker = null;
                    return;
                }
                if (mustRetry) untilNs = Native.deadline(RETRY_NS);
                wait.begin();
            } catch (IllegalStateException refused) {
                // By epoll, for lack of memory or watches: until there are some, completions come later.
                wait = taker;
                untilNs = Native.deadline(RETRY_NS);
            } finally {
                lock.unlock();
            }
            try {
                wait.parkUntil(untilNs);
            } catch (InterruptedException impossible) {
                throw new AssertionError("nobody knows this thread", impossible);
            }
        }
    }

    private void take() throws Throwable {
        long count;
        do {
            int result = (int) Native.ENGINE_COMPLETIONS.invokeExact(
                    address(), Native.NO_WAIT, completions, (long) TAKEN_MAX, outCount);
            // Without a completion: none yet, nothing in flight, or a lack of memory, which the next call tries again.
            count = result == PeltonException.OK ? outCount.get(JAVA_LONG, 0) : 0;
            for (long i = 0; i < count; i++) complete(completions.asSlice(i * COMPLETION_BYTES, COMPLETION_BYTES));
        } while (count == TAKEN_MAX);
    }

    private void complete(MemorySegment completion) throws Throwable {
        Operation it = operations.remove(completion.get(JAVA_LONG, 0));
        if (it == null) throw new AssertionError("libpelton completed an operation that is not in flight");
        it.code = completion.get(JAVA_INT, 8);
        it.error = completion.get(JAVA_INT, 12);
        it.count = completion.get(JAVA_LONG, 16);
        it.opened = completion.get(JAVA_LONG, 24);
        try {
            // The library keeps a status, and a text of that size, until completions are taken again.
            MemorySegment stat = completion.get(ADDRESS, 32).reinterpret(STAT_BYTES);
            if (stat.address() != 0) {
                it.length = stat.get(JAVA_LONG, 8);
                it.device = stat.get(JAVA_LONG, 40);
                it.inode = stat.get(JAVA_LONG, 48);
            }
            if (it.kind == LIST)
                it.text = completion.get(ADDRESS, 40).reinterpret(completion.get(JAVA_LONG, 48)).toArray(JAVA_BYTE);
        } catch (Throwable noMemory) {
            it.failure = noMemory;
        }
        if (it.isAbandoned && it.opened != 0) {
            int ignored = (int) Native.CLOSE.invokeExact(it.opened);
        }
        end(it);
    }

    private void end(Operation it) {
        if (it.isAbandoned) it.free();
        it.isDone = true;
        places.release();
        LockSupport.unpark(it.thread);
    }
}
