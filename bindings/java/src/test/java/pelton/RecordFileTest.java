package pelton;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ch.qos.logback.classic.LoggerContext;
import ch.qos.logback.classic.encoder.PatternLayoutEncoder;
import java.lang.foreign.MemorySegment;
import java.nio.channels.FileChannel;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.logging.Level;
import java.util.logging.Logger;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.io.TempDir;

/** Record files, with the pelton command, and the log's handler. */
@Timeout(value = 120, threadMode = Timeout.ThreadMode.SEPARATE_THREAD)
class RecordFileTest {
    @TempDir
    Path directory;

    private List<String> cat(Path path) throws Exception {
        Path output = directory.resolve("out");
        Process process = new ProcessBuilder(System.getProperty("pelton.tool"), "cat", path.toString())
                .redirectOutput(output.toFile())
                .redirectError(ProcessBuilder.Redirect.INHERIT)
                .start();
        assertEquals(0, process.waitFor());
        return Files.readAllLines(output);
    }

    @Test
    void what_is_appended_is_read_also_while_the_writer_continues() throws Exception {
        Path path = directory.resolve("records");
        try (RecordFile file = RecordFile.open(path)) {
            file.append("one".getBytes());
            file.append(new byte[0]);
            file.flush();
            try (RecordReader reader = RecordReader.open(path)) {
                assertArrayEquals("one".getBytes(), reader.next());
                assertEquals(0, reader.next().length);
                assertNull(reader.next());
                file.append("two".getBytes());
                file.sync();
                assertArrayEquals("two".getBytes(), reader.next());
                assertNull(reader.next());
            }
            assertThrows(PeltonException.TooLarge.class, () -> file.append(new byte[2 << 20]));
            PeltonException second = assertThrows(PeltonException.class, () -> RecordFile.open(path));
            assertEquals(-17, second.code());
        }
        try (RecordFile file = RecordFile.open(path)) {
            file.append("three".getBytes());
        }
        assertEquals(List.of("one", "", "two", "three"), cat(path));
        Path other = Files.writeString(directory.resolve("other"), "no record file, but long enough to be one".repeat(9));
        assertEquals(-31, assertThrows(PeltonException.class, () -> RecordReader.open(other)).code());
    }

    @Test
    void many_threads_append_and_the_order_of_each_is_kept() throws Exception {
        Path path = directory.resolve("records");
        int threadCount = 20, each = 5000;
        RecordFileOptions options = RecordFileOptions.DEFAULTS.withFlushBytes(64 << 10);
        List<Future<Object>> done = new ArrayList<>();
        try (RecordFile file = RecordFile.open(path, options);
                var threads = Executors.newVirtualThreadPerTaskExecutor()) {
            for (int thread = 0; thread < threadCount; thread++) {
                int first = thread * each;
                boolean hasOwn = thread % 2 == 0;
                done.add(threads.submit(() -> {
                    try (Appender own = file.appender()) {
                        for (int i = first; i < first + each; i++) {
                            byte[] message = Integer.toString(i).getBytes();
                            if (hasOwn) own.append(MemorySegment.ofArray(message));
                            else file.append(message);
                        }
                    }
                    return null;
                }));
            }
            for (Future<Object> thread : done) thread.get();
        }
        int[] next = new int[threadCount];
        int count = 0;
        try (RecordReader reader = RecordReader.open(path)) {
            for (byte[] message : reader) {
                int number = Integer.parseInt(new String(message));
                assertEquals(next[number / each]++, number % each);
                count++;
            }
        }
        assertEquals(threadCount * each, count);
    }

    @Test
    void a_torn_end_is_reported_and_cut_off() throws Exception {
        Path path = directory.resolve("records");
        try (RecordFile file = RecordFile.open(path)) {
            file.append("one".getBytes());
            file.flush();
            file.append("torn".getBytes());
        }
        try (FileChannel channel = FileChannel.open(path, StandardOpenOption.WRITE)) {
            channel.truncate(channel.size() - 1);
        }
        try (RecordReader reader = RecordReader.open(path)) {
            assertArrayEquals("one".getBytes(), reader.next());
            assertEquals(-33, assertThrows(PeltonException.class, reader::next).code());
        }
        try (RecordFile file = RecordFile.open(path)) {
            file.append("two".getBytes());
        }
        assertEquals(List.of("one", "two"), cat(path));
    }

    @Test
    void a_log_handler_writes_each_record() throws Exception {
        Path path = directory.resolve("log");
        Logger logger = Logger.getLogger("pelton.test");
        logger.setUseParentHandlers(false);
        RecordFileHandler handler = new RecordFileHandler(path, RecordFileOptions.DEFAULTS);
        logger.addHandler(handler);
        try {
            for (int i = 0; i < 100; i++) logger.log(Level.INFO, "number {0}", i);
            logger.fine("not at this level");
            handler.flush();
            int next = 0;
            try (RecordReader reader = RecordReader.open(path)) {
                for (byte[] record : reader)
                    assertTrue(new String(record).endsWith("number " + next++), new String(record));
            }
            assertEquals(100, next);
        } finally {
            logger.removeHandler(handler);
            handler.close();
        }
    }

    @Test
    void an_appender_of_logback_writes_each_event() throws Exception {
        Path path = directory.resolve("logback.records");
        LoggerContext context = new LoggerContext();
        PatternLayoutEncoder encoder = new PatternLayoutEncoder();
        encoder.setContext(context);
        encoder.setPattern("%level %msg%n");
        encoder.start();
        RecordFileAppender appender = new RecordFileAppender();
        appender.setContext(context);
        appender.setName("RECORDS");
        appender.start();
        assertFalse(appender.isStarted());
        assertTrue(context.getStatusManager().getCopyOfStatusList().stream()
                .anyMatch(status -> status.getMessage().contains("has no <file>: add one")));
        appender.setFile(path.toString());
        appender.setEncoder(encoder);
        appender.start();
        ch.qos.logback.classic.Logger logger = context.getLogger("test");
        logger.addAppender(appender);
        List<Thread> threads = new ArrayList<>();
        for (int thread = 0; thread < 4; thread++)
            threads.add(Thread.startVirtualThread(() -> {
                for (int i = 0; i < 1000; i++) logger.info("number {}", i);
            }));
        for (Thread thread : threads) thread.join();
        context.stop();
        int[] counts = new int[1000];
        try (RecordReader reader = RecordReader.open(path)) {
            for (byte[] message : reader) {
                String text = new String(message);
                assertTrue(text.startsWith("INFO number "), text);
                counts[Integer.parseInt(text.substring(12))]++;
            }
        }
        for (int count : counts) assertEquals(4, count);
    }
}
