package pelton;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.OutputStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Random;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.io.TempDir;

/** Processes that are killed: Java under Java and under the pelton command, which is Rust, and that under Java. */
@Timeout(value = 120, threadMode = Timeout.ThreadMode.SEPARATE_THREAD)
class KillTest {
    private static final Duration LIMIT = Duration.ofSeconds(60);
    private static final Options PATIENT = Options.DEFAULTS.withTimeout(LIMIT);
    private static final int KILLS = 3;

    @TempDir
    Path directory;

    private final long seed = System.nanoTime();
    private final Random random = new Random(seed);

    private String socket() {
        return "unix:" + directory.resolve("socket");
    }

    private String path() {
        return "path:" + directory.resolve("channel");
    }

    /** The numbers that the process has written when it is killed, after some or, without kill, all of them. */
    private List<Integer> numbersOf(Process process, boolean isKilled) throws Exception {
        List<Integer> numbers = new ArrayList<>();
        try (var lines = process.inputReader()) {
            if (isKilled) {
                for (int left = 1 + random.nextInt(3000); left > 0; left--)
                    numbers.add(Integer.parseInt(lines.readLine()));
                Processes.kill(process);
            }
            for (String line = lines.readLine(); line != null && !line.equals("end"); line = lines.readLine())
                numbers.add(Integer.parseInt(line));
        }
        for (int i = 1; i < numbers.size(); i++) assertEquals(numbers.get(i - 1) + 1, numbers.get(i), this::seeded);
        return numbers;
    }

    private String seeded() {
        return "seed " + seed;
    }

    @Test
    void the_next_receiver_continues_where_a_killed_one_was() throws Exception {
        int count = 50_000, next = 0;
        Process sends = Processes.pelton("send", "--capacity", "65536", path());
        try {
            Thread feeder = Thread.ofPlatform().daemon().start(() -> {
                try (OutputStream input = sends.getOutputStream()) {
                    for (int i = 0; i < count; i++) input.write((i + "\n").getBytes());
                } catch (Exception failure) {
                    throw new AssertionError(failure);
                }
            });
            for (int round = 0; round <= KILLS; round++) {
                List<Integer> numbers = numbersOf(Processes.java(Receives.class, path()), round < KILLS);
                int first = numbers.getFirst();
                // The killed receiver had written the last one, but perhaps not released it.
                assertTrue(first == next || round > 0 && first == next - 1, next + ", then " + first + ", " + seeded());
                next = numbers.getLast() + 1;
            }
            assertEquals(count, next, this::seeded);
            feeder.join();
            assertEquals(0, sends.waitFor());
        } finally {
            sends.destroyForcibly();
        }
    }

    @Test
    void the_command_receives_what_a_killed_sender_sent_and_reports_its_death() throws Exception {
        for (int round = 0; round < KILLS; round++) {
            String name = round % 2 == 0 ? path() : socket();
            Path output = directory.resolve("out");
            Process receives = Processes.peltonInto(output, "recv", name);
            try {
                Process sends = Processes.java(Sends.class, name, Integer.toString(Integer.MAX_VALUE));
                int sent = numbersOf(sends, true).getLast() + 1;
                assertEquals(1, receives.waitFor());
                List<String> lines = Files.readAllLines(output);
                // The killed sender had perhaps sent one more.
                assertTrue(
                        lines.size() == sent || lines.size() == sent + 1, sent + ", " + lines.size() + ", " + seeded());
                for (int i = 0; i < lines.size(); i++) assertEquals(Integer.toString(i), lines.get(i), this::seeded);
            } finally {
                receives.destroyForcibly();
            }
        }
    }

    @Test
    void a_killed_sender_is_reported_after_its_last_message() throws Exception {
        try (Listener listener = Listener.listen(socket())) {
            Process process = Processes.java(Sends.class, socket(), "1000");
            try (Receiver receiver = listener.acceptReceiver()) {
                while (!"999".equals(process.inputReader().readLine())) {}
                Processes.kill(process);
                for (int i = 0; i < 1000; i++)
                    assertArrayEquals(Integer.toString(i).getBytes(), receiver.receive(LIMIT));
                assertThrows(PeltonException.PeerDied.class, receiver::receive);
                assertFalse(receiver.resume(Duration.ofMillis(1)));
            } finally {
                process.destroyForcibly();
            }
        }
    }

    @Test
    void a_killed_command_ends_a_wait_and_its_successor_continues() throws Exception {
        for (boolean isVirtual : new boolean[] {false, true}) {
            Thread.Builder builder = isVirtual ? Thread.ofVirtual() : Thread.ofPlatform().daemon();
            Process first = Processes.pelton("send", path());
            Process second = null;
            try (Receiver receiver = Receiver.connect(path(), PATIENT.withCreate(true))) {
                first.getOutputStream().write("1\n2\n".getBytes());
                first.getOutputStream().flush();
                assertArrayEquals("1".getBytes(), receiver.receive());
                assertArrayEquals("2".getBytes(), receiver.receive());
                CompletableFuture<Throwable> ended = new CompletableFuture<>();
                builder.start(() -> ended.complete(assertThrows(PeltonException.class, receiver::receive)));
                Processes.kill(first);
                assertInstanceOf(PeltonException.PeerDied.class, ended.get(60, TimeUnit.SECONDS));
                second = Processes.pelton("send", path());
                second.getOutputStream().write("3\n".getBytes());
                second.getOutputStream().close();
                assertTrue(receiver.resume(LIMIT));
                assertArrayEquals("3".getBytes(), receiver.receive());
                assertThrows(PeltonException.Closed.class, receiver::receive);
                assertEquals(0, second.waitFor());
            } finally {
                first.destroyForcibly();
                if (second != null) second.destroyForcibly();
            }
        }
    }

    @Test
    void a_killed_receiver_is_reported_to_a_sender_that_waits() throws Exception {
        for (boolean isVirtual : new boolean[] {false, true}) {
            Thread.Builder builder = isVirtual ? Thread.ofVirtual() : Thread.ofPlatform().daemon();
            Process process = Processes.peltonInto(directory.resolve("out"), "recv", socket());
            CompletableFuture<Throwable> ended = new CompletableFuture<>();
            try (Sender sender = Sender.connect(socket(), PATIENT)) {
                Thread thread = builder.start(() -> {
                    try {
                        while (true) sender.send(new byte[10_000]);
                    } catch (Throwable failure) {
                        ended.complete(failure);
                    }
                });
                Processes.kill(process);
                assertInstanceOf(PeltonException.PeerDied.class, ended.get(60, TimeUnit.SECONDS));
                thread.join();
            } finally {
                process.destroyForcibly();
            }
        }
    }

    @Test
    void a_killed_caller_interrupts_its_handler_and_a_killed_service_ends_its_call() throws Exception {
        CompletableFuture<Throwable> interrupted = new CompletableFuture<>();
        CompletableFuture<Void> begun = new CompletableFuture<>();
        try (Service service = Service.listen(socket())) {
            Thread running = Thread.ofVirtual().start(() -> {
                try {
                    service.run(request -> {
                        begun.complete(null);
                        try {
                            Thread.sleep(Long.MAX_VALUE);
                        } catch (InterruptedException end) {
                            interrupted.complete(end);
                        }
                        return null;
                    });
                } catch (Throwable failure) {
                    interrupted.complete(failure);
                }
            });
            Process calls = Processes.pelton("call", socket(), "hold");
            try {
                begun.get(60, TimeUnit.SECONDS);
                Processes.kill(calls);
                assertInstanceOf(InterruptedException.class, interrupted.get(60, TimeUnit.SECONDS));
            } finally {
                calls.destroyForcibly();
                service.stop();
                running.join();
            }
        }
        String name = "unix:" + directory.resolve("service");
        Process serves = Processes.java(Serves.class, name);
        try {
            assertEquals("listens", serves.inputReader().readLine());
            Process calls = Processes.pelton("call", name, "hold");
            assertEquals("holds", serves.inputReader().readLine());
            Processes.kill(serves);
            assertEquals(1, calls.waitFor());
            assertNull(calls.inputReader().readLine());
        } finally {
            serves.destroyForcibly();
        }
    }
}
