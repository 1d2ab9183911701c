package pelton;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CancellationException;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Executor;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.FutureTask;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.RejectedExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.logging.Level;
import java.util.logging.Logger;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.io.TempDir;

/** Clients and services, in one process and in two. */
@Timeout(value = 120, threadMode = Timeout.ThreadMode.SEPARATE_THREAD)
class CallTest {
    private static final Duration LIMIT = Duration.ofSeconds(60);
    private static final Options PATIENT = Options.DEFAULTS.withTimeout(LIMIT);
    private static final String SPAN = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    @TempDir
    Path directory;

    private String name;

    @BeforeEach
    void named() {
        name = "unix:" + directory.resolve("socket");
    }

    /** A service that runs on a thread of its own. */
    private static final class Running implements AutoCloseable {
        final Service service;
        final FutureTask<Void> ran;

        Running(String name, Options options, boolean isVirtual, Service.Handler handler) {
            service = Service.listen(name, options);
            ran = new FutureTask<>(() -> {
                service.run(handler);
                return null;
            });
            (isVirtual ? Thread.ofVirtual() : Thread.ofPlatform().daemon()).start(ran);
        }

        void await() throws Exception {
            ran.get(60, TimeUnit.SECONDS);
        }

        @Override
        public void close() throws Exception {
            service.stop();
            await();
            service.close();
        }
    }

    private static Process serves(String name) throws Exception {
        Process process = Processes.java(Serves.class, name);
        assertEquals("listens", process.inputReader().readLine());
        return process;
    }

    private static byte[] bytes(int number) {
        return Integer.toString(number).getBytes();
    }

    @Test
    void calls_get_their_replies_from_platform_and_virtual_threads() throws Exception {
        for (boolean isVirtual : new boolean[] {false, true}) {
            name = "unix:" + directory.resolve("socket" + isVirtual);
            try (Running running = new Running(name, Options.DEFAULTS, isVirtual, Request::bytes);
                    Client client = Client.connect(name, PATIENT);
                    var threads = isVirtual
                            ? Executors.newVirtualThreadPerTaskExecutor()
                            : Executors.newFixedThreadPool(4)) {
                List<Future<Object>> done = new ArrayList<>();
                for (int thread = 0; thread < 4; thread++) {
                    int first = thread * 1_000_000;
                    done.add(threads.submit(() -> {
                        for (int i = first; i < first + 2000; i++) assertArrayEquals(bytes(i), client.call(bytes(i)));
                        return null;
                    }));
                }
                for (Future<Object> each : done) each.get();
                assertEquals(0, client.call(new byte[0], LIMIT).length);
                // In pieces, both ways.
                byte[] large = new byte[10 << 20];
                for (int i = 0; i < large.length; i++) large[i] = (byte) (i / 1000);
                assertArrayEquals(large, client.call(large, LIMIT));
                assertArrayEquals(large, client.callAsync(large).get());
                assertThrows(PeltonException.TooLarge.class, () -> client.call(new byte[(64 << 20) + 1]));
            }
        }
    }

    @Test
    void requests_have_their_client_deadline_and_span() throws Exception {
        LinkedBlockingQueue<Request> requests = new LinkedBlockingQueue<>();
        try (Running running = new Running(name, Options.DEFAULTS, true, request -> {
                    requests.add(request);
                    String span = request.traceparent();
                    return span == null ? null : span.getBytes();
                });
                Client client = Client.connect(name, PATIENT)) {
            assertEquals(0, client.call(new byte[] {7}).length);
            Request first = requests.take();
            assertArrayEquals(new byte[] {7}, first.bytes());
            assertNull(first.timeLeft());
            assertEquals(ProcessHandle.current().pid(), first.peerPid());
            byte[] span = client.call(
                    new byte[0], CallOptions.DEFAULTS.withTraceparent(SPAN).withTimeout(LIMIT));
            assertEquals(SPAN, new String(span));
            Duration left = requests.take().timeLeft();
            assertTrue(left.isPositive() && left.compareTo(LIMIT) <= 0, left.toString());
            client.notify(new byte[] {8});
            Request notified = requests.take();
            assertTrue(notified.isNotification());
            assertArrayEquals(new byte[] {8}, notified.bytes());
        }
    }

    @Test
    void an_executor_handles_or_rejects_requests() throws Exception {
        try (Service service = Service.listen(name)) {
            FutureTask<Thread> ran = new FutureTask<>(() -> {
                service.run(
                        request -> Thread.currentThread().getName().getBytes(),
                        // The second request is rejected.
                        new Executor() {
                            private int count;

                            @Override
                            public void execute(Runnable task) {
                                if (count++ == 1) throw new RejectedExecutionException();
                                task.run();
                            }
                        });
                return Thread.currentThread();
            });
            Thread.ofPlatform().daemon().name("receives").start(ran);
            try (Client client = Client.connect(name, PATIENT)) {
                assertEquals("receives", new String(client.call(new byte[0])));
                assertThrows(PeltonException.Abandoned.class, () -> client.call(new byte[0]));
                assertEquals("receives", new String(client.call(new byte[0])));
            }
            service.stop();
            ran.get(60, TimeUnit.SECONDS);
        }
    }

    @Test
    void a_reply_comes_in_parts() throws Exception {
        int count = 20_000;
        try (Running running = new Running(name, Options.DEFAULTS.withCapacity(64 << 10), true, request -> {
                    for (int i = 0; i < count; i++) request.part(bytes(i));
                    return request.bytes().length == 0 ? null : request.bytes();
                });
                Client client = Client.connect(name, PATIENT.withCapacity(64 << 10))) {
            for (byte[] last : new byte[][] {{}, {7}}) {
                int next = 0;
                List<byte[]> rest = new ArrayList<>();
                try (Call call = client.stream(last)) {
                    for (byte[] part : call) {
                        if (next < count) assertArrayEquals(bytes(next++), part);
                        else rest.add(part);
                    }
                    assertNull(call.next());
                }
                assertEquals(count, next);
                assertEquals(last.length, rest.size());
                assertEquals(last.length, client.call(last).length - 88_890);
            }
        }
    }

    @Test
    void parts_that_nobody_takes_are_limited() throws Exception {
        CountDownLatch cancelled = new CountDownLatch(1);
        try (Running running = new Running(name, Options.DEFAULTS, true, request -> {
                    try {
                        while (request.bytes().length > 0) request.part(new byte[10_000]);
                    } catch (CancellationException | InterruptedException end) {
                        cancelled.countDown();
                        throw end;
                    }
                    return null;
                });
                Client client = Client.connect(name, PATIENT.withCallBytesMax(1 << 20))) {
            PeltonException failure = assertThrows(PeltonException.class, () -> client.call(new byte[1]));
            assertEquals(-9, failure.code());
            cancelled.await();
            assertEquals(0, client.call(new byte[0]).length);
        }
    }

    @Test
    void the_last_part_counts_for_the_limit_too() throws Exception {
        try (Service service = Service.listen(name)) {
            FutureTask<Void> ran = new FutureTask<>(() -> {
                service.run(
                        request -> {
                            if (request.bytes().length == 0) return null;
                            request.part(new byte[600_000]);
                            return new byte[600_000];
                        },
                        Runnable::run);
                return null;
            });
            Thread.ofPlatform().daemon().start(ran);
            try (Client client = Client.connect(name, PATIENT.withCallBytesMax(1 << 20));
                    Call call = client.stream(new byte[1])) {
                // Its reply comes after both.
                assertEquals(0, client.call(new byte[0]).length);
                assertEquals(-9, assertThrows(PeltonException.class, call::next).code());
            }
            service.stop();
            ran.get(60, TimeUnit.SECONDS);
        }
    }

    @Test
    void a_call_that_another_thread_closes_ends_its_wait() throws Exception {
        CountDownLatch entered = new CountDownLatch(1), mayEnd = new CountDownLatch(1);
        try (Running running = new Running(name, Options.DEFAULTS, true, request -> {
                    entered.countDown();
                    while (true) {
                        try {
                            mayEnd.await();
                            return null;
                        } catch (InterruptedException ignored) {
                            // On purpose: no completion comes that could wake the caller.
                        }
                    }
                });
                Client client = Client.connect(name, PATIENT)) {
            try (Call call = client.stream(new byte[0])) {
                FutureTask<byte[]> waiting = new FutureTask<>(call::next);
                Thread thread = Thread.ofPlatform().daemon().start(waiting);
                entered.await();
                while (thread.getState() != Thread.State.WAITING) Thread.onSpinWait();
                call.close();
                assertInstanceOf(
                        CancellationException.class,
                        assertThrows(ExecutionException.class, () -> waiting.get(60, TimeUnit.SECONDS))
                                .getCause());
            } finally {
                mayEnd.countDown();
            }
        }
    }

    @Test
    void threads_that_flood_a_small_lane_all_get_their_turn() throws Exception {
        int threadCount = 4, each = 50_000;
        for (boolean spins : new boolean[] {false, true}) {
            name = "unix:" + directory.resolve("socket" + spins);
            AtomicInteger received = new AtomicInteger();
            try (Service service = Service.listen(name, Options.DEFAULTS.withCapacity(64 << 10))) {
                FutureTask<Void> ran = new FutureTask<>(() -> {
                    service.run(
                            request -> {
                                received.incrementAndGet();
                                return null;
                            },
                            Runnable::run);
                    return null;
                });
                Thread.ofPlatform().daemon().start(ran);
                try (Client client = Client.connect(
                                name, PATIENT.withCapacity(64 << 10).withSpin(spins));
                        var threads = Executors.newVirtualThreadPerTaskExecutor()) {
                    List<Future<Object>> done = new ArrayList<>();
                    for (int thread = 0; thread < threadCount; thread++) {
                        done.add(threads.submit(() -> {
                            for (int i = 0; i < each; i++) client.notify(new byte[i * 37 % 4000]);
                            return null;
                        }));
                    }
                    for (Future<Object> thread : done) thread.get(60, TimeUnit.SECONDS);
                    assertEquals(0, client.call(new byte[0], LIMIT).length);
                }
                assertEquals(threadCount * each + 1, received.get());
                service.stop();
                ran.get(60, TimeUnit.SECONDS);
            }
        }
    }

    @Test
    void handlers_that_fail_say_so() throws Exception {
        Logger logger = Logger.getLogger("pelton");
        Level level = logger.getLevel();
        logger.setLevel(Level.OFF);
        try (Running running = new Running(name, Options.DEFAULTS, true, request -> {
                    if (request.bytes().length == 0) throw new PeltonException.Failed(42, "no bytes");
                    throw new ArithmeticException("a mistake");
                });
                Client client = Client.connect(name, PATIENT)) {
            PeltonException.Failed own =
                    assertThrows(PeltonException.Failed.class, () -> client.call(new byte[0]));
            assertEquals(42, own.code());
            assertArrayEquals("no bytes".getBytes(), own.bytes());
            PeltonException.Failed other =
                    assertThrows(PeltonException.Failed.class, () -> client.call(new byte[1]));
            assertEquals(1, other.code());
            assertTrue(other.getMessage().contains("a mistake"), other.getMessage());
            assertInstanceOf(
                    PeltonException.Failed.class,
                    assertThrows(ExecutionException.class, client.callAsync(new byte[0])::get).getCause());
        } finally {
            logger.setLevel(level);
        }
    }

    @Test
    void each_way_to_cancel_interrupts_the_handler() throws Exception {
        LinkedBlockingQueue<Boolean> entered = new LinkedBlockingQueue<>(), interrupted = new LinkedBlockingQueue<>();
        for (boolean isVirtual : new boolean[] {false, true}) {
            name = "unix:" + directory.resolve("socket" + isVirtual);
            try (Running running = new Running(name, Options.DEFAULTS, isVirtual, request -> {
                entered.add(true);
                try {
                    Thread.sleep(Long.MAX_VALUE);
                    return null;
                } catch (InterruptedException interrupt) {
                    interrupted.add(request.isCancelled());
                    throw interrupt;
                }
            })) {
                try (Client client = Client.connect(name, PATIENT)) {
                    CompletableFuture<byte[]> future = client.callAsync(new byte[0]);
                    entered.take();
                    assertTrue(future.cancel(true));
                    assertTrue(interrupted.take());
                    assertThrows(CancellationException.class, future::get);

                    Call call = client.stream(new byte[0]);
                    entered.take();
                    call.close();
                    assertTrue(interrupted.take());
                    assertThrows(CancellationException.class, call::next);

                    assertThrows(
                            PeltonException.TimedOut.class, () -> client.call(new byte[0], Duration.ofMillis(20)));
                    entered.take();
                    assertTrue(interrupted.take());

                    FutureTask<byte[]> waiting = new FutureTask<>(() -> client.call(new byte[0]));
                    Thread thread = Thread.ofPlatform().daemon().start(waiting);
                    entered.take();
                    thread.interrupt();
                    assertInstanceOf(
                            InterruptedException.class,
                            assertThrows(ExecutionException.class, waiting::get).getCause());
                    assertTrue(interrupted.take());

                    future = client.callAsync(new byte[0]);
                    entered.take();
                    client.close();
                    assertInstanceOf(
                            PeltonException.Closed.class,
                            assertThrows(ExecutionException.class, future::get).getCause());
                    assertTrue(interrupted.take());
                    assertThrows(IllegalStateException.class, () -> client.call(new byte[0]));
                }
            }
        }
    }

    @Test
    void an_interrupted_service_interrupts_its_handlers_and_waits_for_them() throws Exception {
        CountDownLatch entered = new CountDownLatch(1), ended = new CountDownLatch(1);
        Service service = Service.listen(name);
        FutureTask<Object> ran = new FutureTask<>(() -> {
            service.run(request -> {
                entered.countDown();
                try {
                    new CountDownLatch(1).await();
                } finally {
                    ended.countDown();
                }
                return null;
            });
            return null;
        });
        Logger logger = Logger.getLogger("pelton");
        Level level = logger.getLevel();
        logger.setLevel(Level.OFF);
        try (service) {
            Thread thread = Thread.ofVirtual().start(ran);
            try (Client client = Client.connect(name, PATIENT)) {
                CompletableFuture<byte[]> reply = client.callAsync(new byte[0]);
                entered.await();
                thread.interrupt();
                assertInstanceOf(
                        InterruptedException.class, assertThrows(ExecutionException.class, ran::get).getCause());
                assertEquals(0, ended.getCount());
                assertInstanceOf(
                        PeltonException.Failed.class,
                        assertThrows(ExecutionException.class, reply::get).getCause());
            }
        } finally {
            logger.setLevel(level);
        }
    }

    @Test
    void an_interrupt_ends_a_service_that_handles_on_its_thread() throws Exception {
        CountDownLatch entered = new CountDownLatch(1);
        Logger logger = Logger.getLogger("pelton");
        Level level = logger.getLevel();
        logger.setLevel(Level.OFF);
        try (Service service = Service.listen(name)) {
            FutureTask<Void> ran = new FutureTask<>(() -> {
                service.run(
                        request -> {
                            entered.countDown();
                            new CountDownLatch(1).await();
                            return null;
                        },
                        Runnable::run);
                return null;
            });
            Thread thread = Thread.ofPlatform().daemon().start(ran);
            try (Client client = Client.connect(name, PATIENT)) {
                CompletableFuture<byte[]> reply = client.callAsync(new byte[0]);
                entered.await();
                thread.interrupt();
                assertInstanceOf(
                        InterruptedException.class,
                        assertThrows(ExecutionException.class, () -> ran.get(60, TimeUnit.SECONDS))
                                .getCause());
                assertThrows(ExecutionException.class, reply::get);
            }
        } finally {
            logger.setLevel(level);
        }
    }

    @Test
    void a_stop_does_not_wait_for_tasks_that_the_executor_drops() throws Exception {
        CountDownLatch dropped = new CountDownLatch(1);
        try (Service service = Service.listen(name)) {
            FutureTask<Void> ran = new FutureTask<>(() -> {
                service.run(Request::bytes, task -> dropped.countDown());
                return null;
            });
            Thread.ofPlatform().daemon().start(ran);
            try (Client client = Client.connect(name, PATIENT)) {
                CompletableFuture<byte[]> reply = client.callAsync(new byte[0]);
                dropped.await();
                service.stop();
                ran.get(60, TimeUnit.SECONDS);
                service.close();
                assertThrows(ExecutionException.class, () -> reply.get(60, TimeUnit.SECONDS));
            }
        }
    }

    @Test
    void a_service_that_drains_keeps_its_calls_and_returns() throws Exception {
        CountDownLatch entered = new CountDownLatch(1), mayReply = new CountDownLatch(1);
        try (Running running = new Running(name, Options.DEFAULTS, true, request -> {
                    entered.countDown();
                    mayReply.await();
                    return request.bytes();
                });
                Client client = Client.connect(name, PATIENT)) {
            CompletableFuture<byte[]> reply = client.callAsync(bytes(1));
            entered.await();
            running.service.drain();
            PeltonException later = assertThrows(PeltonException.class, () -> client.call(bytes(2)));
            assertEquals(-9, later.code());
            assertThrows(WrongThreadException.class, running.service::close);
            mayReply.countDown();
            assertArrayEquals(bytes(1), reply.get());
            running.await();
        }
    }

    @Test
    void a_killed_service_fails_the_calls_in_flight_and_the_next() throws Exception {
        Process process = serves(name);
        try (Client client = Client.connect(name, PATIENT)) {
            List<CompletableFuture<byte[]>> replies = new ArrayList<>();
            for (int i = 0; i < 100; i++) replies.add(client.callAsync("hold".getBytes()));
            for (int i = 0; i < 100; i++) assertEquals("holds", process.inputReader().readLine());
            FutureTask<byte[]> platform = new FutureTask<>(() -> client.call("hold".getBytes()));
            Thread.ofPlatform().daemon().start(platform);
            assertEquals("holds", process.inputReader().readLine());
            process.destroyForcibly().waitFor();
            for (CompletableFuture<byte[]> reply : replies)
                assertInstanceOf(
                        PeltonException.PeerDied.class,
                        assertThrows(ExecutionException.class, reply::get).getCause());
            assertInstanceOf(
                    PeltonException.PeerDied.class,
                    assertThrows(ExecutionException.class, platform::get).getCause());
            assertThrows(PeltonException.PeerDied.class, () -> client.call(bytes(1)));
        } finally {
            process.destroyForcibly();
        }
    }

    @Test
    void cancelled_calls_make_way_for_those_that_wait() throws Exception {
        CountDownLatch interrupted = new CountDownLatch(1024);
        Service.Handler handler = request -> {
            if (!new String(request.bytes()).equals("hold")) return request.bytes();
            try {
                Thread.sleep(Long.MAX_VALUE);
            } finally {
                interrupted.countDown();
            }
            return null;
        };
        try (Running running = new Running(name, Options.DEFAULTS, true, handler);
                Client client = Client.connect(name, PATIENT)) {
            List<Call> held = new ArrayList<>();
            for (int i = 0; i < 1024; i++) held.add(client.stream("hold".getBytes()));
            List<CompletableFuture<byte[]>> waiting = new ArrayList<>();
            for (int i = 0; i < 100; i++) waiting.add(client.callAsync(bytes(i)));
            for (Call call : held) call.close();
            for (int i = 0; i < 100; i++) assertArrayEquals(bytes(i), waiting.get(i).get());
            interrupted.await();
            assertTrue(running.service.isOpen());
        }
    }

    @Test
    void ten_thousand_virtual_threads_are_in_calls_at_once_on_two_carriers() throws Exception {
        int clientCount = 10, each = 1000;
        Process process = serves(name);
        List<Client> clients = new ArrayList<>();
        try (var threads = Executors.newVirtualThreadPerTaskExecutor()) {
            for (int i = 0; i < clientCount; i++) clients.add(Client.connect(name, PATIENT));
            // Nobody gets a reply before the last of them is in its handler.
            byte[] request = ("together " + clientCount * each).getBytes();
            List<Future<byte[]>> replies = new ArrayList<>();
            for (Client client : clients)
                for (int i = 0; i < each; i++) replies.add(threads.submit(() -> client.call(request)));
            for (Future<byte[]> reply : replies) assertArrayEquals(request, reply.get());
            // More than are in flight at once in one client: the others wait for their turn.
            List<CompletableFuture<byte[]>> more = new ArrayList<>();
            for (int i = 0; i < 10_000; i++) more.add(clients.getFirst().callAsync(bytes(i)));
            for (int i = 0; i < 10_000; i++) assertArrayEquals(bytes(i), more.get(i).get());
            process.getOutputStream().close();
            assertEquals(0, process.waitFor());
        } finally {
            process.destroyForcibly();
            for (Client client : clients) client.close();
        }
    }
}
