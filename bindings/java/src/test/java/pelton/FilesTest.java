package pelton;

import static java.nio.file.StandardOpenOption.APPEND;
import static java.nio.file.StandardOpenOption.CREATE;
import static java.nio.file.StandardOpenOption.CREATE_NEW;
import static java.nio.file.StandardOpenOption.READ;
import static java.nio.file.StandardOpenOption.WRITE;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.channels.AsynchronousCloseException;
import java.nio.file.AccessDeniedException;
import java.nio.file.FileAlreadyExistsException;
import java.nio.file.FileSystemException;
import java.nio.file.LinkOption;
import java.nio.file.NoSuchFileException;
import java.nio.file.NotDirectoryException;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Random;
import java.util.concurrent.Callable;
import java.util.concurrent.CancellationException;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.FutureTask;
import java.util.stream.IntStream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.io.TempDir;

/** Files, compared with what the JDK's own functions read and write. */
@Timeout(value = 120, threadMode = Timeout.ThreadMode.SEPARATE_THREAD)
class FilesTest {
    @TempDir
    Path directory;

    private static byte[] bytes(int count) {
        byte[] bytes = new byte[count];
        new Random(count).nextBytes(bytes);
        return bytes;
    }

    private Path fifo() throws Exception {
        Path path = directory.resolve("fifo");
        assertEquals(0, new ProcessBuilder("mkfifo", path.toString()).inheritIO().start().waitFor());
        return path;
    }

    @Test
    void what_is_written_is_read_at_offsets_and_at_the_position() throws Exception {
        Path path = directory.resolve("notes");
        try (Files files = new Files(); File file = files.open(path, READ, WRITE, CREATE)) {
            file.write("hello, ".getBytes());
            file.write("file".getBytes());
            assertEquals("file", new String(file.pread(100, 7)));
            assertEquals(0, file.pread(5, 11).length);
            assertEquals(0, file.read(5).length);
            file.pwrite("J".getBytes(), 0);
            file.pwrite(new byte[0], 0);
            file.fsync(false);
            file.fsync(true);
            assertEquals(11, file.size());
            assertEquals("Jello, file", java.nio.file.Files.readString(path));
            try (File more = files.open(path, APPEND); File whole = files.open(path)) {
                more.write("!".getBytes());
                assertEquals("Jel", new String(whole.read(3)));
                assertEquals("lo, file!", new String(whole.read()));
            }
            assertThrows(IllegalArgumentException.class, () -> file.pread(-1, 0));
            assertThrows(IllegalArgumentException.class, () -> file.pread(1, -1));
            file.close();
            assertThrows(IllegalStateException.class, () -> file.pread(1, 0));
        }
    }

    @Test
    void whole_files_copies_and_directories_also_async() throws Exception {
        byte[] large = bytes(3_000_001);
        Path path = directory.resolve("größe"), copy = directory.resolve("copy");
        try (Files files = new Files()) {
            files.writeFile(path, bytes(5_000_000));
            files.writeFileAsync(path, large).join();
            assertArrayEquals(large, java.nio.file.Files.readAllBytes(path));
            assertArrayEquals(large, files.readFile(path));
            files.writeFile(copy, bytes(4_000_000));
            assertEquals(large.length, files.copyAsync(path, copy).join());
            assertArrayEquals(large, java.nio.file.Files.readAllBytes(copy));
            java.nio.file.Files.createLink(directory.resolve("same"), path);
            assertThrows(FileSystemException.class, () -> files.copy(path, directory.resolve("same")));
            assertEquals(large.length, java.nio.file.Files.size(path));
            assertTrue(new String(files.readFileAsync(Path.of("/proc/self/status")).join()).contains("Pid:"));
            try (File file = files.openAsync(copy, READ, WRITE).join()) {
                file.pwriteAsync(new byte[] {7}, 0).join();
                file.fsyncAsync(true).join();
                assertEquals(7, file.readAsync(1).join()[0]);
                assertEquals(large[1], file.preadAsync(1, 1).join()[0]);
                assertEquals(large.length, file.sizeAsync().join());
            }
            Path many = java.nio.file.Files.createDirectory(directory.resolve("many"));
            List<String> names = IntStream.range(0, 600).mapToObj(i -> "%04d".formatted(i)).toList();
            for (String name : names) java.nio.file.Files.createFile(many.resolve(name));
            assertEquals(names, files.list(many).stream().sorted().toList());
            List<String> found = new ArrayList<>(files.listAsync(directory).join());
            found.sort(null);
            assertEquals(List.of("copy", "größe", "many", "same"), found);
        }
    }

    @Test
    void errors_are_those_of_the_jdk() throws Exception {
        Path there = java.nio.file.Files.writeString(directory.resolve("there"), "text");
        Path missing = directory.resolve("missing"), link = directory.resolve("link");
        java.nio.file.Files.createSymbolicLink(link, there);
        try (Files files = new Files(); Files below = new Files(directory)) {
            NoSuchFileException none = assertThrows(NoSuchFileException.class, () -> files.open(missing));
            assertEquals(missing.toString(), none.getFile());
            assertThrows(FileAlreadyExistsException.class, () -> files.open(there, WRITE, CREATE_NEW));
            assertThrows(NotDirectoryException.class, () -> files.list(there));
            FileSystemException followed =
                    assertThrows(FileSystemException.class, () -> files.open(link, LinkOption.NOFOLLOW_LINKS));
            assertTrue(followed.getReason().contains("symbolic"), followed.getReason());
            ExecutionException later =
                    assertThrows(ExecutionException.class, () -> files.readFileAsync(missing).get());
            assertInstanceOf(NoSuchFileException.class, later.getCause());
            try (File reading = files.open(there)) {
                assertThrows(FileSystemException.class, () -> reading.write(new byte[1]));
            }
            assertEquals("text", new String(below.readFile(Path.of("there"))));
            assertThrows(FileSystemException.class, () -> below.readFile(Path.of("../there")));
            assertThrows(FileSystemException.class, () -> below.readFile(Path.of("/etc/passwd")));
            // Root may read what the mode forbids.
            if (!System.getProperty("user.name").equals("root")) {
                java.nio.file.Files.setPosixFilePermissions(there, java.util.Set.of());
                assertThrows(AccessDeniedException.class, () -> files.open(there));
            }
        }
    }

    @Test
    void ten_thousand_virtual_threads_and_platform_threads_share_a_file() throws Exception {
        int count = 10_000, size = 512;
        Path path = directory.resolve("shared");
        try (Files files = new Files();
                File file = files.open(path, READ, WRITE, CREATE);
                var virtual = Executors.newVirtualThreadPerTaskExecutor();
                var platform = Executors.newFixedThreadPool(4)) {
            List<Future<?>> tasks = new ArrayList<>();
            for (int i = 0; i < count; i++) {
                byte[] page = new byte[size];
                Arrays.fill(page, (byte) i);
                long offset = (long) i * size;
                tasks.add((i % 10 == 0 ? platform : virtual).submit(() -> {
                    file.pwrite(page, offset);
                    assertArrayEquals(page, file.pread(size, offset));
                    return null;
                }));
            }
            for (Future<?> task : tasks) task.get();
            assertEquals((long) count * size, file.size());
        }
        byte[] all = java.nio.file.Files.readAllBytes(path);
        for (int i = 0; i < count; i++) assertEquals((byte) i, all[i * size + size - 1]);
    }

    /** Starts a task that waits in an operation, and returns when it waits. */
    private static Future<?> waiting(Thread.Builder kind, Callable<?> task, List<Thread> threads) {
        FutureTask<?> future = new FutureTask<>(task);
        Thread thread = kind.start(future);
        // A task that fails instead does so for the caller of get().
        while (thread.getState() != Thread.State.WAITING && !future.isDone()) Thread.onSpinWait();
        threads.add(thread);
        return future;
    }

    private static long virtualBytes() throws Exception {
        String pages = java.nio.file.Files.readString(Path.of("/proc/self/statm")).split(" ")[0];
        return Long.parseLong(pages) * 4096;
    }

    /** A FIFO's reader waits for as long as the test wants. */
    @Test
    void operations_that_wait_keep_no_carrier_and_cancelled_ones_leave_no_memory() throws Exception {
        Path path = fifo();
        try (Files files = new Files()) {
            // Far more than the two carriers.
            List<CompletableFuture<File>> opens = new ArrayList<>();
            for (int i = 0; i < 50; i++) opens.add(files.openAsync(path));
            assertEquals(List.of("fifo"), files.listAsync(directory).join());
            try (File file = files.open(path, READ, WRITE)) {
                for (CompletableFuture<File> open : opens) open.join().close();
                CompletableFuture<byte[]> read = file.readAsync(5);
                file.write("12345".getBytes());
                assertEquals("12345", new String(read.get()));

                List<Thread> threads = new ArrayList<>();
                long before = virtualBytes();
                for (int i = 0; i < 1000; i++) {
                    Thread.Builder kind = i % 10 == 0 ? Thread.ofPlatform() : Thread.ofVirtual();
                    Future<?> cancelled = waiting(kind, () -> file.read(1 << 20), threads);
                    threads.removeLast().interrupt();
                    assertInstanceOf(
                            InterruptedException.class,
                            assertThrows(ExecutionException.class, cancelled::get).getCause());
                }
                long grown = virtualBytes() - before;
                assertTrue(grown < 256 << 20, "1,000 cancelled reads of 1 MiB have taken " + grown + " bytes");
                CompletableFuture<byte[]> given = file.readAsync(5);
                assertTrue(given.cancel(true));
                assertThrows(CancellationException.class, given::join);
            }
        }
    }

    @Test
    void what_exceeds_1024_operations_in_flight_waits_for_its_turn() throws Exception {
        Path path = fifo();
        List<Thread> threads = new ArrayList<>();
        List<File> readers = new ArrayList<>();
        List<Future<?>> waits = new ArrayList<>();
        try (Files files = new Files(); Files others = new Files(); File writer = others.open(path, READ, WRITE)) {
            for (int i = 0; i < 1024; i++) readers.add(files.open(path));
            for (File reader : readers) waits.add(waiting(Thread.ofVirtual(), () -> reader.read(1), threads));
            waits.add(waiting(Thread.ofVirtual(), () -> files.list(directory), threads));
            writer.write(new byte[1024]);
            for (Future<?> wait : waits) wait.get();
            assertEquals(List.of("fifo"), waits.getLast().get());
            for (File reader : readers) reader.close();
        }
    }

    @Test
    void closing_ends_what_waits_and_files_remain_to_be_closed() throws Exception {
        Path path = fifo();
        Files files = new Files();
        List<Thread> threads = new ArrayList<>();
        List<File> readers = new ArrayList<>();
        List<Future<?>> reads = new ArrayList<>();
        try (Files others = new Files(); File writer = others.open(path, READ, WRITE)) {
            for (int i = 0; i < 20; i++) {
                File reader = files.open(path);
                readers.add(reader);
                Thread.Builder kind = i % 2 == 0 ? Thread.ofPlatform() : Thread.ofVirtual();
                reads.add(waiting(kind, () -> reader.read(10), threads));
            }
            files.close();
            for (Future<?> read : reads)
                assertInstanceOf(
                        AsynchronousCloseException.class,
                        assertThrows(ExecutionException.class, read::get).getCause());
            assertThrows(IllegalStateException.class, () -> files.open(path));
            for (File reader : readers) {
                reader.close();
                reader.close();
            }
            files.close();
            writer.write("x".getBytes());
            assertEquals("x", new String(writer.read(1)));
        }
    }
}
