package pelton;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotNull;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.netty.channel.EventLoopGroup;
import io.netty.channel.IoEventLoop;
import io.netty.channel.MultiThreadIoEventLoopGroup;
import io.netty.channel.epoll.EpollIoHandler;
import java.io.ByteArrayInputStream;
import java.io.InputStream;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.ValueLayout;
import java.lang.management.ManagementFactory;
import java.nio.BufferOverflowException;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.Callable;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Executors;
import java.util.concurrent.Flow;
import java.util.concurrent.Future;
import java.util.concurrent.FutureTask;
import java.util.concurrent.Semaphore;
import java.util.concurrent.SubmissionPublisher;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.logging.Handler;
import java.util.logging.LogRecord;
import java.util.logging.Logger;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.io.TempDir;

/** Senders, receivers and listeners, also with the pelton command. */
@Timeout(value = 120, threadMode = Timeout.ThreadMode.SEPARATE_THREAD)
class ChannelTest {
    private static final Duration LIMIT = Duration.ofSeconds(60);
    private static final Options PATIENT = Options.DEFAULTS.withTimeout(LIMIT);

    @TempDir
    Path directory;

    private String name;

    @BeforeEach
    void named() {
        name = "unix:" + directory.resolve("socket");
    }

    private record Pair(Sender sender, Receiver receiver) implements AutoCloseable {
        @Override
        public void close() {
            sender.close();
            receiver.close();
        }
    }

    private Pair pair(Options options) throws Exception {
        try (Listener listener = Listener.listen(name, options)) {
            Future<Sender> sender = started(() -> Sender.connect(name, options.withTimeout(LIMIT)));
            Receiver receiver = listener.acceptReceiver();
            return new Pair(sender.get(), receiver);
        }
    }

    private static <T> Future<T> started(Callable<T> action) {
        FutureTask<T> task = new FutureTask<>(action);
        Thread.ofPlatform().daemon().start(task);
        return task;
    }

    private static byte[] bytes(int number) {
        return Integer.toString(number).getBytes();
    }

    @Test
    void messages_arrive_in_order_and_then_the_end() throws Exception {
        try (Pair pair = pair(Options.DEFAULTS)) {
            pair.sender.send(new byte[0]);
            pair.sender.send(MemorySegment.ofArray(bytes(1)));
            assertTrue(pair.sender.trySend(bytes(2)));
            pair.sender.sendAll(List.of(bytes(3), bytes(4)));
            byte[] large = new byte[1 << 20];
            large[large.length - 1] = 7;
            pair.sender.send(large);
            pair.sender.close();
            assertEquals(0, pair.receiver.receive().length);
            assertArrayEquals(bytes(1), pair.receiver.receive());
            assertArrayEquals(bytes(2), pair.receiver.tryReceive());
            assertEquals(2, pair.receiver.receiveMany(2).size());
            int count = 0;
            for (byte[] message : pair.receiver) {
                assertArrayEquals(large, message);
                count++;
            }
            assertEquals(1, count);
            PeltonException end = assertThrows(PeltonException.Closed.class, pair.receiver::receive);
            assertEquals(-2, end.code());
        }
    }

    @Test
    void empty_and_full_are_answers_and_too_large_is_an_error() throws Exception {
        try (Pair pair = pair(Options.DEFAULTS.withCapacity(64 << 10))) {
            assertNull(pair.receiver.tryReceive());
            assertNull(pair.receiver.receive(Duration.ofMillis(1)));
            assertFalse(pair.receiver.receive(message -> {}, Duration.ZERO));
            int sent = 0;
            while (pair.sender.trySend(new byte[1000])) sent++;
            assertFalse(pair.sender.send(new byte[1000], Duration.ofMillis(1)));
            assertFalse(pair.sender.waitReleased(Duration.ofMillis(1)));
            assertThrows(PeltonException.TooLarge.class, () -> pair.sender.send(new byte[64 << 10]));
            for (int i = 0; i < sent; i++) assertEquals(1000, pair.receiver.receive().length);
            assertTrue(pair.sender.waitReleased(LIMIT));
        }
    }

    @Test
    void a_message_is_there_only_in_its_handler() throws Exception {
        try (Pair pair = pair(Options.DEFAULTS)) {
            pair.sender.send(new byte[] {1, 0, 0, 0, 2, 0, 0, 0});
            List<Message> kept = new ArrayList<>();
            List<MemorySegment> segments = new ArrayList<>();
            pair.receiver.receive(message -> {
                assertEquals(8, message.size());
                assertEquals(1, message.getInt(0));
                assertEquals(2L << 32 | 1, message.getLong(0));
                assertThrows(IndexOutOfBoundsException.class, () -> message.getInt(5));
                assertThrows(IndexOutOfBoundsException.class, () -> message.getByte(-1));
                assertThrows(IndexOutOfBoundsException.class, () -> message.copyTo(4, new byte[8], 0, 8));
                assertEquals(8, message.segment().byteSize());
                assertThrows(WrongThreadException.class, pair.receiver::tryReceive);
                assertThrows(WrongThreadException.class, pair.receiver::close);
                kept.add(message);
                segments.add(message.segment());
            });
            assertThrows(IllegalStateException.class, () -> kept.getFirst().getByte(0));
            assertThrows(IllegalStateException.class, () -> kept.getFirst().size());
            assertThrows(
                    IllegalStateException.class,
                    () -> segments.getFirst().get(java.lang.foreign.ValueLayout.JAVA_BYTE, 0));
        }
    }

    @Test
    void a_publisher_takes_what_is_requested_and_a_subscriber_sends_until_the_end() throws Exception {
        Options options = Options.DEFAULTS.withCreate(true).withTimeout(LIMIT);
        String path = "path:" + directory.resolve("channel");
        try (Sender sender = Sender.connect(path, Options.DEFAULTS.withCreate(true))) {
            for (int i = 0; i < 5; i++) sender.send(bytes(i));
            List<byte[]> taken = new ArrayList<>();
            CompletableFuture<Flow.Subscription> two = new CompletableFuture<>();
            Receiver receiver = Receiver.connect(path, options);
            Iterator<byte[]> iterator = receiver.iterator();
            assertTrue(iterator.hasNext() && iterator.hasNext());
            receiver.publisher().subscribe(new Flow.Subscriber<>() {
                private Flow.Subscription subscription;

                @Override
                public void onSubscribe(Flow.Subscription subscription) {
                    this.subscription = subscription;
                    subscription.request(2);
                }

                @Override
                public void onNext(byte[] message) {
                    taken.add(message);
                    if (taken.size() == 2) two.complete(subscription);
                }

                @Override
                public void onError(Throwable failure) {
                    two.completeExceptionally(failure);
                }

                @Override
                public void onComplete() {}
            });
            two.get().cancel();
            // It waits for the role, which the cancellation frees. What was not requested is there still.
            try (Receiver next = Receiver.connect(path, options)) {
                assertArrayEquals(bytes(0), taken.get(0));
                assertArrayEquals(bytes(1), taken.get(1));
                for (int i = 2; i < 5; i++) assertArrayEquals(bytes(i), next.receive());
            }
        }
        try (Pair pair = pair(Options.DEFAULTS.withCapacity(64 << 10));
                SubmissionPublisher<byte[]> publisher = new SubmissionPublisher<>(Runnable::run, 16)) {
            SenderSubscriber subscriber = pair.sender.subscriber();
            publisher.subscribe(subscriber);
            // Into a lane that is smaller, and a buffer: the publisher learns of the slow receiver.
            boolean isSlow = false;
            int count = 0;
            while (!isSlow) {
                byte[] message = new byte[4000];
                message[0] = (byte) count;
                isSlow = publisher.offer(message, null) < 0;
                if (!isSlow) count++;
            }
            publisher.close();
            int received = 0;
            for (byte[] message : pair.receiver) assertEquals((byte) received++, message[0]);
            assertEquals(count, received);
            subscriber.sent().get();
        }
        try (Pair pair = pair(Options.DEFAULTS);
                SubmissionPublisher<byte[]> publisher = new SubmissionPublisher<>()) {
            SenderSubscriber subscriber = pair.sender.subscriber();
            publisher.subscribe(subscriber);
            publisher.closeExceptionally(new IllegalStateException("broken"));
            assertThrows(PeltonException.Closed.class, pair.receiver::receive);
            assertEquals(
                    "broken",
                    assertThrows(ExecutionException.class, subscriber.sent()::get).getCause().getMessage());
        }
        try (Pair pair = pair(Options.DEFAULTS);
                SubmissionPublisher<byte[]> publisher = new SubmissionPublisher<>()) {
            SenderSubscriber subscriber = pair.sender.subscriber();
            publisher.subscribe(subscriber);
            publisher.submit(bytes(1));
            assertArrayEquals(bytes(1), pair.receiver.receive());
            subscriber.sent().cancel(true);
            assertThrows(PeltonException.Closed.class, pair.receiver::receive);
            // The subscriber's thread is about to leave it.
            while (!isFree(pair.sender)) Thread.onSpinWait();
        }
    }

    @Test
    void a_held_message_is_there_until_it_is_released_and_a_buffer_gets_a_copy() throws Exception {
        try (Pair pair = pair(Options.DEFAULTS)) {
            for (int i = 10; i < 19; i++) pair.sender.send(bytes(i));
            HeldMessage held = pair.receiver.receiveHeld();
            assertArrayEquals(bytes(11), pair.receiver.receive());
            MemorySegment segment = held.segment();
            ByteBuffer buffer = held.buffer();
            assertArrayEquals(bytes(10), segment.toArray(ValueLayout.JAVA_BYTE));
            assertEquals('1', buffer.get(0));
            assertTrue(segment.isReadOnly() && buffer.isReadOnly());
            assertThrows(
                    WrongThreadException.class,
                    () -> unwrapped(started(() -> segment.get(ValueLayout.JAVA_BYTE, 0))));
            held.close();
            held.close();
            assertThrows(IllegalStateException.class, () -> segment.get(ValueLayout.JAVA_BYTE, 0));
            assertThrows(IllegalStateException.class, () -> buffer.get(0));
            assertThrows(IllegalStateException.class, () -> held.buffer().get(0));

            // The library holds none of a batch: this is a copy.
            assertThrows(IllegalStateException.class, () -> pair.receiver.receiveMany(message -> {
                throw new IllegalStateException("after the first of a batch");
            }, 3));
            try (HeldMessage copy = pair.receiver.receiveHeld()) {
                assertArrayEquals(bytes(13), copy.segment().toArray(ValueLayout.JAVA_BYTE));
            }
            for (ByteBuffer to : List.of(ByteBuffer.allocate(5), ByteBuffer.allocateDirect(5))) {
                to.put((byte) 'x');
                pair.receiver.receive(to);
                assertTrue(pair.receiver.receive(to, LIMIT));
                assertThrows(BufferOverflowException.class, () -> pair.receiver.receive(to));
                assertEquals(0, to.remaining());
                byte[] all = new byte[5];
                to.flip().get(all);
                assertEquals(to.hasArray() ? "x1415" : "x1617", new String(all));
            }
            HeldMessage last = pair.receiver.receiveHeld();
            assertFalse(pair.receiver.receive(ByteBuffer.allocate(1), Duration.ZERO));
            assertNull(pair.receiver.receiveHeld(Duration.ZERO));
            pair.receiver.close();
            assertArrayEquals(bytes(18), last.segment().toArray(ValueLayout.JAVA_BYTE));
            last.close();
        }
    }

    private static boolean isFree(Sender sender) {
        try {
            sender.close();
            return true;
        } catch (WrongThreadException inUse) {
            return false;
        }
    }

    private static <T> T unwrapped(Future<T> result) throws Throwable {
        try {
            return result.get();
        } catch (ExecutionException failure) {
            throw failure.getCause();
        }
    }

    @Test
    void a_message_has_the_span_of_its_sender() throws Exception {
        String first = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", second = first.replace("-01", "-00");
        try (Pair pair = pair(Options.DEFAULTS.withCapacity(64 << 10).withTraced(true))) {
            for (boolean isHandled : new boolean[] {false, true}) {
                List<String> spans = new ArrayList<>();
                pair.sender.send(bytes(0));
                pair.sender.sendTraced(bytes(1), first);
                pair.sender.send(bytes(2));
                pair.sender.sendTraced(bytes(3), "no traceparent");
                pair.sender.sendTraced(bytes(4), second);
                if (isHandled) {
                    while (spans.size() < 5) pair.receiver.receiveMany(message -> spans.add(message.traceparent()), 64);
                } else {
                    for (int i = 0; i < 5; i++) {
                        assertArrayEquals(bytes(i), pair.receiver.receive());
                        spans.add(pair.receiver.traceparent());
                    }
                }
                assertEquals(Arrays.asList(null, first, null, null, second), spans);
            }
            int sent = 0;
            while (pair.sender.sendTraced(new byte[1000], first, Duration.ZERO)) sent++;
            Future<Object> later = started(() -> {
                pair.sender.sendTraced(bytes(5), second);
                return null;
            });
            for (int i = 0; i < sent; i++) assertEquals(1000, pair.receiver.receive().length);
            later.get();
            assertArrayEquals(bytes(5), pair.receiver.receive());
            assertEquals(second, pair.receiver.traceparent());
        }
    }

    @Test
    void a_handler_that_throws_loses_no_later_message() throws Exception {
        try (Pair pair = pair(Options.DEFAULTS)) {
            pair.sender.sendAll(List.of(bytes(1), bytes(2), bytes(3)));
            assertThrows(
                    ArithmeticException.class,
                    () -> pair.receiver.receiveMany(
                            message -> {
                                throw new ArithmeticException();
                            },
                            10));
            assertArrayEquals(bytes(2), pair.receiver.receive());
            assertArrayEquals(bytes(3), pair.receiver.receive());
            assertNull(pair.receiver.tryReceive());
            assertTrue(pair.sender.waitReleased(LIMIT));
        }
    }

    @Test
    void a_closed_handle_and_a_second_thread_get_a_clear_exception() throws Exception {
        Pair pair = pair(Options.DEFAULTS);
        try (pair) {
            Thread waiting = Thread.currentThread();
            CountDownLatch inHandler = new CountDownLatch(1), tried = new CountDownLatch(1);
            Future<Object> second = started(() -> {
                inHandler.await();
                try {
                    assertTrue(assertThrows(WrongThreadException.class, pair.receiver::tryReceive)
                            .getMessage()
                            .contains(waiting.toString()));
                    assertThrows(WrongThreadException.class, pair.receiver::close);
                } finally {
                    tried.countDown();
                }
                return null;
            });
            pair.sender.send(bytes(1));
            pair.receiver.receive(message -> {
                inHandler.countDown();
                try {
                    tried.await();
                } catch (InterruptedException interrupted) {
                    throw new AssertionError(interrupted);
                }
            });
            second.get();
        }
        pair.close();
        assertTrue(assertThrows(IllegalStateException.class, pair.receiver::tryReceive)
                .getMessage()
                .contains("the Receiver is closed"));
        assertThrows(IllegalStateException.class, () -> pair.sender.trySend(bytes(1)));
    }

    @Test
    void an_interrupt_ends_each_wait_and_loses_nothing() throws Exception {
        for (boolean isVirtual : new boolean[] {false, true}) {
            Thread.Builder builder = isVirtual ? Thread.ofVirtual() : Thread.ofPlatform().daemon();
            try (Pair pair = pair(Options.DEFAULTS.withCapacity(64 << 10))) {
                assertTrue(isInterrupted(builder, pair.receiver::receive));
                pair.sender.send(bytes(1));
                assertArrayEquals(bytes(1), pair.receiver.receive());
                while (pair.sender.trySend(new byte[1000])) {}
                assertTrue(isInterrupted(builder, () -> pair.sender.send(new byte[1000])));
                pair.sender.close();
                int count = 0;
                for (byte[] message : pair.receiver) count += message.length / 1000;
                assertTrue(count > 10);
                assertTrue(isInterrupted(builder, () -> Receiver.connect("unix:" + directory.resolve("no"), PATIENT)));
                try (Listener listener = Listener.listen("unix:" + directory.resolve("other"))) {
                    assertTrue(isInterrupted(builder, listener::acceptSender));
                    assertNull(listener.acceptSender(Duration.ofMillis(1)));
                }
            }
            Files.deleteIfExists(directory.resolve("socket"));
        }
    }

    /** Whether an interrupt ends the action, in whatever state it comes. */
    private static boolean isInterrupted(Thread.Builder builder, org.junit.jupiter.api.function.Executable action)
            throws Exception {
        CompletableFuture<Boolean> ended = new CompletableFuture<>();
        Thread thread = builder.start(() -> {
            try {
                action.execute();
                ended.complete(false);
            } catch (InterruptedException interrupted) {
                ended.complete(true);
            } catch (Throwable failure) {
                ended.completeExceptionally(failure);
            }
        });
        thread.interrupt();
        return ended.get(60, TimeUnit.SECONDS);
    }

    @Test
    void two_carriers_serve_hundreds_of_waiting_virtual_threads() throws Exception {
        int count = 200;
        List<Pair> pairs = new ArrayList<>();
        try (var threads = Executors.newVirtualThreadPerTaskExecutor()) {
            for (int i = 0; i < count; i++) {
                name = "unix:" + directory.resolve("s" + i);
                pairs.add(pair(Options.DEFAULTS.withCapacity(64 << 10)));
            }
            CountDownLatch waiting = new CountDownLatch(count);
            List<Future<Integer>> sums = new ArrayList<>();
            for (Pair pair : pairs)
                sums.add(threads.submit(() -> {
                    waiting.countDown();
                    int sum = 0;
                    for (byte[] message : pair.receiver) sum += Integer.parseInt(new String(message));
                    return sum;
                }));
            // Each thread has begun: none keeps its carrier while it waits.
            waiting.await();
            for (int message = 1; message <= 10; message++)
                for (Pair pair : pairs) pair.sender.send(bytes(message));
            for (Pair pair : pairs) pair.sender.close();
            for (Future<Integer> sum : sums) assertEquals(55, sum.get(60, TimeUnit.SECONDS));
        } finally {
            for (Pair pair : pairs) pair.close();
        }
    }

    @Test
    void a_virtual_sender_parks_until_there_is_space() throws Exception {
        try (Pair pair = pair(Options.DEFAULTS.withCapacity(64 << 10))) {
            CompletableFuture<Void> sent = new CompletableFuture<>();
            Thread.ofVirtual().start(() -> {
                try {
                    for (int i = 0; i < 2000; i++) pair.sender.send(new byte[1000]);
                    pair.sender.close();
                    sent.complete(null);
                } catch (Throwable failure) {
                    sent.completeExceptionally(failure);
                }
            });
            int count = 0;
            for (byte[] message : pair.receiver) count += message.length / 1000;
            sent.get(60, TimeUnit.SECONDS);
            assertEquals(2000, count);
        }
    }

    @Test
    void an_event_loop_of_netty_receives_between_threads_by_the_descriptor() throws Exception {
        EventLoopGroup loops = new MultiThreadIoEventLoopGroup(1, EpollIoHandler.newFactory());
        try (ThreadChannel channel = ThreadChannel.create()) {
            Semaphore arrived = new Semaphore(0);
            List<String> received = Collections.synchronizedList(new ArrayList<>());
            Set<Thread> threads = ConcurrentHashMap.newKeySet();
            CompletableFuture<Void> ended = NettyReceiver.run(
                    channel.receiver(),
                    message -> {
                        threads.add(Thread.currentThread());
                        received.add(new String(message.toArray()));
                        arrived.release();
                    },
                    (IoEventLoop) loops.next());
            int sent = 0;
            // One at a time while the loop sleeps, and more than it takes in a turn.
            for (int count : new int[] {1, 1, 1000, 1}) {
                for (int i = 0; i < count; i++) channel.sender().send(bytes(sent++));
                arrived.acquire(count);
            }
            channel.sender().close();
            ended.get();
            for (int i = 0; i < sent; i++) assertEquals(Integer.toString(i), received.get(i));
            assertEquals(1, threads.size());
        } finally {
            loops.shutdownGracefully(0, 1, TimeUnit.SECONDS).sync();
        }
    }

    @Test
    void options_limit_senders_users_and_memory() throws Exception {
        try (Receiver receiver = Receiver.gather(name, Options.DEFAULTS.withLanes(1).withAllowUids(12345, -2))) {
            Future<Sender> first = started(() -> Sender.connect(name, PATIENT));
            while (!first.isDone()) assertNull(receiver.receive(Duration.ofMillis(1)));
            Future<Sender> second = started(() -> Sender.connect(name, PATIENT));
            while (!second.isDone()) assertNull(receiver.receive(Duration.ofMillis(1)));
            assertThrows(PeltonException.class, () -> unwrapped(second));
            first.get().close();
        }
        assertThrows(
                PeltonException.class, () -> Receiver.gather(name, Options.DEFAULTS.withMemoryBytesMax(1000)).close());
        assertThrows(
                PeltonException.class, () -> Service.listen(name, Options.DEFAULTS.withMemoryBytesMax(1000)).close());
        assertThrows(PeltonException.class, () -> Service.listen(name, Options.DEFAULTS.withLanes(5000)).close());
    }

    @Test
    void a_gathering_receiver_gets_the_messages_of_all_senders() throws Exception {
        try (Receiver receiver = Receiver.gather(name, Options.DEFAULTS)) {
            for (int i = 0; i < 3; i++)
                started(() -> {
                    try (Sender sender = Sender.connect(name, PATIENT)) {
                        for (int message = 0; message < 100; message++) sender.send(bytes(message));
                    }
                    return null;
                });
            int[] next = new int[4];
            for (int i = 0; i < 300; i++)
                assertTrue(receiver.receive(
                        message -> assertArrayEquals(bytes(next[message.lane()]++), message.toArray()), LIMIT));
        }
    }

    @Test
    void a_path_keeps_messages_while_nobody_is_there() throws Exception {
        String path = "path:" + directory.resolve("channel");
        try (Sender sender = Sender.connect(path, Options.DEFAULTS.withCreate(true))) {
            for (int i = 0; i < 100; i++) sender.send(bytes(i));
        }
        try (Receiver receiver = Receiver.connect(path)) {
            for (int i = 0; i < 100; i++) assertArrayEquals(bytes(i), receiver.receive(LIMIT));
        }
    }

    @Test
    void the_jar_has_a_library_for_each_architecture() throws Exception {
        Map<String, InputStream> jar = Map.of(
                "native/amd64/libpelton.so", new ByteArrayInputStream(new byte[] {1}),
                "native/aarch64/libpelton.so", new ByteArrayInputStream(new byte[] {2}));
        assertArrayEquals(new byte[] {2}, Native.carried(jar::get, "aarch64"));
        assertArrayEquals(new byte[] {1}, Native.carried(jar::get, "amd64"));
        assertNull(Native.carried(jar::get, "riscv64"));
    }

    @Test
    void without_a_listener_connecting_fails_and_says_so() {
        PeltonException failure = assertThrows(PeltonException.NoListener.class, () -> Sender.connect(name));
        assertEquals(-11, failure.code());
        assertTrue(failure.getMessage().contains("socket"), failure.getMessage());
        assertThrows(
                PeltonException.TimedOut.class,
                () -> Sender.connect(name, Options.DEFAULTS.withTimeout(Duration.ofMillis(5))));
    }

    @Test
    void the_command_sends_and_java_receives() throws Exception {
        try (Listener listener = Listener.listen(name)) {
            Process process = Processes.pelton("send", name);
            try (Receiver receiver = listener.acceptReceiver()) {
                process.getOutputStream().write("one\ntwo\nthree\n".getBytes());
                process.getOutputStream().close();
                List<String> lines = new ArrayList<>();
                for (byte[] line : receiver) lines.add(new String(line).strip());
                assertEquals(List.of("one", "two", "three"), lines);
                assertEquals(0, process.waitFor());
            } finally {
                process.destroyForcibly();
            }
        }
    }

    @Test
    void java_sends_and_the_command_receives() throws Exception {
        Path output = directory.resolve("out");
        Process process = Processes.peltonInto(output, "recv", name);
        try (Sender sender = Sender.connect(name, PATIENT)) {
            for (int i = 0; i < 1000; i++) sender.send(bytes(i));
            assertTrue(sender.waitReleased(LIMIT));
            sender.close();
            assertEquals(0, process.waitFor());
            List<String> lines = Files.readAllLines(output);
            assertEquals(1000, lines.size());
            for (int i = 0; i < 1000; i++) assertEquals(Integer.toString(i), lines.get(i));
        } finally {
            process.destroyForcibly();
        }
    }

    @Test
    void a_million_messages_allocate_nothing_and_leave_memory_flat() throws Exception {
        var threads = (com.sun.management.ThreadMXBean) ManagementFactory.getThreadMXBean();
        int warm = 300_000, count = 1_000_000;
        // A small lane: a receiver that falls behind makes a large one use more of its memory.
        try (Pair pair = pair(Options.DEFAULTS.withCapacity(1 << 20))) {
            Future<Object> sent = started(() -> {
                byte[] message = new byte[256];
                for (int i = 0; i < warm + count; i++) pair.sender.send(message);
                return null;
            });
            long[] sum = new long[1];
            Receiver.Handler handler = message -> sum[0] += message.size() + message.getByte(255);
            for (int i = 0; i < warm; i++) pair.receiver.receive(handler);
            long resident = residentKib();
            long[] allocated = new long[10];
            for (int round = 0; round < allocated.length; round++) {
                long before = threads.getCurrentThreadAllocatedBytes();
                for (int i = 0; i < count / allocated.length; i++) pair.receiver.receive(handler);
                allocated[round] = threads.getCurrentThreadAllocatedBytes() - before;
            }
            long grown = residentKib() - resident;
            sent.get();
            assertEquals(256L * (warm + count), sum[0]);
            Arrays.sort(allocated);
            // The virtual machine itself allocates once, where it links a call that a wait makes first.
            assertEquals(0, allocated[allocated.length / 2], () -> Arrays.toString(allocated));
            assertTrue(Arrays.stream(allocated).sum() < count, () -> Arrays.toString(allocated));
            assertTrue(grown < 8 << 10, grown + " KiB");

            ByteBuffer buffer = ByteBuffer.allocate(256);
            Callable<Object> buffered = () -> {
                pair.receiver.receive(buffer.clear());
                return null;
            };
            Callable<Object> held = () -> {
                pair.receiver.receiveHeld().close();
                return null;
            };
            List<Long> each = new ArrayList<>();
            for (Callable<Object> receive : List.of(buffered, held)) {
                byte[] message = new byte[256];
                long[] rounds = new long[11];
                for (int round = 0; round < rounds.length; round++) {
                    for (int i = 0; i < 1_000; i++) pair.sender.send(message);
                    long before = threads.getCurrentThreadAllocatedBytes();
                    for (int i = 0; i < 1_000; i++) receive.call();
                    rounds[round] = threads.getCurrentThreadAllocatedBytes() - before;
                }
                each.add(rounds[rounds.length - 1] / 1_000);
            }
            assertEquals(0, each.get(0));
            // As its documentation says.
            assertTrue(each.get(1) <= 500, () -> each.toString());
        }
    }

    /** Bytes of the heap that are in use after a collection, and KiB of the process. */
    private static long[] memory() throws Exception {
        for (int i = 0; i < 3; i++) System.gc();
        return new long[] {ManagementFactory.getMemoryMXBean().getHeapMemoryUsage().getUsed(), residentKib()};
    }

    @FunctionalInterface
    private interface Receiving {
        /** Receives up to so many messages of 256 bytes. Returns their number. */
        int receive(int countMax) throws Exception;
    }

    private static void receiveByEach(List<Receiving> ways, int count) throws Exception {
        for (Receiving way : ways) for (int left = count; left > 0; ) left -= way.receive(left);
    }

    @Test
    void a_million_copies_held_messages_and_batches_leave_memory_flat() throws Exception {
        int warm = 20_000, count = 250_000;
        ByteBuffer buffer = ByteBuffer.allocateDirect(256);
        try (ThreadChannel channel = ThreadChannel.create(Options.DEFAULTS.withCapacity(1 << 20))) {
            Receiver receiver = channel.receiver();
            List<Receiving> ways = List.of(
                    countMax -> receiver.receive().length / 256,
                    countMax -> {
                        receiver.receive(buffer.clear());
                        return buffer.position() / 256;
                    },
                    countMax -> {
                        try (HeldMessage held = receiver.receiveHeld()) {
                            return (int) held.segment().byteSize() / 256;
                        }
                    },
                    countMax -> receiver.receiveMany(Math.min(countMax, 32)).size());
            Future<Object> sent = started(() -> {
                byte[] message = new byte[256];
                List<byte[]> ten = Collections.nCopies(10, message);
                for (int i = 0; i < ways.size() * (warm + count); i += 20) {
                    for (int one = 0; one < 10; one++) channel.sender().send(message);
                    channel.sender().sendAll(ten);
                }
                return null;
            });
            receiveByEach(ways, warm);
            long[] before = memory();
            receiveByEach(ways, count);
            long[] after = memory();
            sent.get();
            assertNull(receiver.tryReceive());
            assertTrue(after[0] - before[0] < 1 << 20, () -> "heap " + before[0] + ", " + after[0]);
            assertTrue(after[1] - before[1] < 8 << 10, () -> "process " + before[1] + ", " + after[1] + " KiB");
        }
    }

    @Test
    void info_has_sizes_peer_and_counters() throws Exception {
        try (Pair pair = pair(Options.DEFAULTS.withCapacity(1 << 20))) {
            for (int i = 0; i < 3; i++) pair.sender.send(new byte[100]);
            pair.receiver.receive();
            Info sender = pair.sender.info(), receiver = pair.receiver.info();
            Info.Peer self = new Info.Peer((int) ProcessHandle.current().pid(), sender.peer().uid());
            for (Info info : List.of(sender, receiver)) {
                assertEquals(1 << 20, info.capacity());
                assertEquals(self, info.peer());
                byte[] tooLarge = new byte[(int) info.messageBytesMax() + 1];
                assertThrows(PeltonException.TooLarge.class, () -> pair.sender.send(tooLarge));
            }
            assertEquals(List.of(2L, 3L, 300L), List.of(sender.unreleased(), sender.messages(), sender.bytes()));
            assertEquals(List.of(0L, 1L, 100L), List.of(receiver.unreleased(), receiver.messages(), receiver.bytes()));
            long waits = receiver.waits();
            for (int i = 0; i < 2; i++) pair.receiver.receive();
            assertFalse(pair.receiver.receive(message -> {}, Duration.ofMillis(1)));
            assertTrue(pair.receiver.info().waits() > waits);
            pair.sender.close();
            assertThrows(IllegalStateException.class, pair.sender::info);
        }
    }

    private static long residentKib() throws Exception {
        for (String line : Files.readAllLines(Path.of("/proc/self/status")))
            if (line.startsWith("VmRSS:")) return Long.parseLong(line.replaceAll("[^0-9]", ""));
        throw new AssertionError("/proc/self/status has no VmRSS");
    }

    @Test
    void a_forgotten_handle_is_closed_and_the_first_is_logged() throws Exception {
        AtomicInteger warnings = new AtomicInteger();
        Logger logger = Logger.getLogger("pelton");
        Handler counter = new Handler() {
            @Override
            public void publish(LogRecord record) {
                warnings.incrementAndGet();
            }

            @Override
            public void flush() {}

            @Override
            public void close() {}
        };
        logger.addHandler(counter);
        logger.setUseParentHandlers(false);
        try {
            Receiver[] receivers = {forgetSender("a"), forgetSender("b")};
            for (Receiver receiver : receivers)
                try (receiver) {
                    while (true) {
                        System.gc();
                        byte[] none = receiver.receive(Duration.ofMillis(10));
                        assertNull(none);
                    }
                } catch (PeltonException.Closed closed) {
                    assertNotNull(closed.getMessage());
                }
            assertEquals(1, warnings.get());
        } finally {
            logger.removeHandler(counter);
        }
    }

    private Receiver forgetSender(String socket) throws Exception {
        name = "unix:" + directory.resolve(socket);
        return pair(Options.DEFAULTS).receiver;
    }
}
