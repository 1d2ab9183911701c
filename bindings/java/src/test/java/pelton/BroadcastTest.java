package pelton;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotNull;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.Callable;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.FutureTask;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.function.Executable;
import org.junit.jupiter.api.io.TempDir;

/** Publishers and subscribers: policies, waits, ends; in threads, and with the pelton command. */
@Timeout(value = 120, threadMode = Timeout.ThreadMode.SEPARATE_THREAD)
class BroadcastTest {
    private static final Duration LIMIT = Duration.ofSeconds(60);
    private static final Options PATIENT = Options.DEFAULTS.withTimeout(LIMIT);
    private static final PublisherOptions SMALL =
            PublisherOptions.DEFAULTS.withLane(Options.DEFAULTS.withCapacity(64 << 10));
    private static final SubscriberOptions JOINING = SubscriberOptions.DEFAULTS.withConnection(PATIENT);

    @TempDir
    Path directory;

    private String name() {
        return "unix:" + directory.resolve("prices");
    }

    /** Receives until the publisher has closed; each message is received or counted as missed. Returns all of them. */
    private static long receiveAll(Subscriber subscriber) {
        long received = 0, missed = 0;
        for (Delivery delivery : subscriber) {
            received++;
            missed += delivery.missed();
            assertEquals(received + missed, delivery.number());
            assertEquals(Long.toString(delivery.number()), new String(delivery.data()).trim());
        }
        assertTrue(received > 0);
        return received + subscriber.missed();
    }

    @Test
    void a_virtual_thread_for_each_subscriber_receives_from_many_publishers() throws Exception {
        long total = 1000;
        List<String> names = Stream.of("bids", "offers").map(topic -> "unix:" + directory.resolve(topic)).toList();
        try (Publisher bids = Publisher.open(names.get(0), SMALL);
                Publisher offers = Publisher.open(names.get(1), SMALL);
                var threads = Executors.newVirtualThreadPerTaskExecutor()) {
            List<Future<Long>> all = new ArrayList<>();
            for (String name : names) {
                all.add(threads.submit(() -> {
                    try (Subscriber subscriber = Subscriber.connect(name, JOINING)) {
                        return receiveAll(subscriber);
                    }
                }));
            }
            for (Publisher publisher : List.of(bids, offers)) assertTrue(publisher.waitSubscribers(1, LIMIT));
            for (long number = 1; number <= total; number++) {
                bids.send(Long.toString(number).getBytes());
                offers.send(Long.toString(number).getBytes());
            }
            bids.close();
            offers.close();
            for (Future<Long> received : all) assertEquals(total, received.get());
        }
    }

    @Test
    void each_thread_receives_by_its_policy() throws Exception {
        long total = 20_000;
        try (Publisher publisher = Publisher.open(name(), SMALL);
                var threads = Executors.newVirtualThreadPerTaskExecutor()) {
            List<Future<Long>> all = new ArrayList<>();
            for (Policy policy : Policy.values()) {
                Callable<Long> receives = () -> {
                    try (Subscriber subscriber = Subscriber.connect(name(), JOINING.withPolicy(policy))) {
                        long found = receiveAll(subscriber);
                        assertTrue(policy != Policy.GATE || subscriber.missed() == 0);
                        return found;
                    }
                };
                all.add(threads.submit(receives));
                FutureTask<Long> platform = new FutureTask<>(receives);
                Thread.ofPlatform().daemon().start(platform);
                all.add(platform);
            }
            assertTrue(publisher.waitSubscribers(6, LIMIT));
            for (long number = 1; number <= total; number++)
                publisher.send(("%-100d").formatted(number).getBytes());
            assertTrue(publisher.waitReleased(LIMIT));
            assertEquals(6, publisher.subscribers().size());
            assertEquals(
                    List.of(Policy.values()),
                    publisher.subscribers().stream().map(SubscriberState::policy).sorted().distinct().collect(Collectors.toList()));
            publisher.close();
            for (Future<Long> each : all) assertEquals(total, each.get());
        }
    }

    private void slowGate(boolean isVirtual) throws Exception {
        try (Publisher publisher = Publisher.ofThreads(SMALL);
                Subscriber subscriber = publisher.subscriber(SubscriberOptions.DEFAULTS)) {
            int sent = 0;
            while (publisher.trySend(new byte[1000])) sent++;
            assertFalse(publisher.send(new byte[1000], Duration.ofMillis(1)));
            assertFalse(publisher.waitReleased(Duration.ZERO));
            SubscriberState state = publisher.subscribers().getFirst();
            assertEquals(Policy.GATE, state.policy());
            assertEquals(sent, state.behind());
            assertEquals(ProcessHandle.current().pid(), state.pid());
            assertNotNull(state.holds());
            assertNull(state.lagAfter());
            assertFalse(state.lags());
            FutureTask<Void> sending = new FutureTask<>(() -> {
                publisher.send("more".getBytes());
                return null;
            });
            (isVirtual ? Thread.ofVirtual() : Thread.ofPlatform()).start(sending);
            for (int number = 1; number <= sent; number++) {
                Delivery delivery = subscriber.receive(LIMIT);
                assertEquals(number, delivery.number());
                assertEquals(1000, delivery.data().length);
            }
            sending.get();
            assertArrayEquals("more".getBytes(), subscriber.receive().data());
            assertTrue(publisher.waitReleased(LIMIT));
            assertNull(publisher.subscribers().getFirst().holds());
            assertNull(subscriber.tryReceive());
            assertNull(subscriber.receive(Duration.ofMillis(1)));
            assertTrue(subscriber.arm());
            publisher.send(new byte[30_000]);
            assertFalse(subscriber.arm());
            subscriber.disarm();
            assertEquals(30_000, subscriber.tryReceive().data().length);
            assertTrue(publisher.fd() >= 0 && subscriber.fd() >= 0);
        }
    }

    @Test
    void a_slow_gate_is_shown_and_waited_for() throws Exception {
        slowGate(false);
        slowGate(true);
    }

    @Test
    void policies_that_miss_messages_count_them() throws Exception {
        PublisherOptions options = SMALL.withHistory(5).withHoldMax(Duration.ofMillis(10));
        try (Publisher publisher = Publisher.ofThreads(options)) {
            publisher.send("before".getBytes());
            SubscriberOptions joining = SubscriberOptions.DEFAULTS;
            assertEquals(-9, assertThrows(PeltonException.class, () -> publisher.subscriber(joining)).code());
            try (Subscriber late = publisher.subscriber(joining.withLagAfter(Duration.ofMillis(10))
                            .withSlack(8192)
                            .withStartFrom(SubscriberOptions.OLDEST));
                    Subscriber lag = publisher.subscriber(joining.withPolicy(Policy.LAG).withStartFrom(1));
                    Subscriber latest = publisher.subscriber(joining.withPolicy(Policy.LATEST))) {
                for (Subscriber each : List.of(late, lag))
                    assertEquals("before", new String(each.tryReceive().data()));
                for (int i = 0; i < 200; i++) publisher.send(new byte[1000]);
                assertEquals(199, latest.tryReceive().missed());
                assertEquals(Duration.ofMillis(10), publisher.subscribers().getFirst().lagAfter());
                for (Subscriber each : List.of(late, lag)) {
                    long found = 1, missed = 0;
                    for (Delivery delivery; (delivery = each.tryReceive()) != null; found++) {
                        missed += delivery.missed();
                        assertEquals(found + 1 + missed, delivery.number());
                    }
                    assertEquals(201, found + missed);
                    assertEquals(missed, each.missed());
                    assertTrue(missed > 0);
                }
            }
            publisher.admit();
            assertTrue(publisher.subscribers().isEmpty());
            for (SubscriberOptions wrong : List.of(
                    joining.withPolicy(Policy.LAG).withLagAfter(Duration.ofMillis(1)),
                    joining.withSlack(4096),
                    joining.withConnection(PATIENT)))
                assertEquals(-14, assertThrows(PeltonException.class, () -> publisher.subscriber(wrong)).code());
            List<Runnable> negative = List.of(
                    () -> SMALL.withHistory(-1),
                    () -> SMALL.withHoldMax(Duration.ofNanos(-1)),
                    () -> joining.withLagAfter(Duration.ofNanos(-1)),
                    () -> joining.withSlack(-1),
                    () -> joining.withStartFrom(SubscriberOptions.OLDEST - 1));
            negative.forEach(wrong -> assertThrows(IllegalArgumentException.class, wrong::run));
            SubscriberOptions forEver = joining.withLagAfter(Duration.ofSeconds(Long.MAX_VALUE));
            assertEquals(-9, assertThrows(PeltonException.class, () -> publisher.subscriber(forEver)).code());
            assertThrows(PeltonException.TooLarge.class, () -> publisher.send(new byte[64 << 10]));
            assertFalse(publisher.waitSubscribers(1, Duration.ofMillis(1)));
        }
        assertThrows(PeltonException.NoListener.class, () -> Subscriber.connect(name()));
    }

    @Test
    void an_end_is_thrown_and_a_successor_continues() throws Exception {
        Process first = Processes.pelton("pub", name(), "--subscribers", "1");
        first.getOutputStream().write("one\n".getBytes());
        first.getOutputStream().flush();
        try (Subscriber subscriber = Subscriber.connect(name(), JOINING)) {
            assertEquals("one", new String(subscriber.receive(LIMIT).data()));
            assertEquals(-9, assertThrows(PeltonException.class, () -> subscriber.resume(Duration.ZERO)).code());
            first.destroyForcibly().waitFor();
            assertThrows(PeltonException.PeerDied.class, () -> subscriber.receive(LIMIT));
            assertFalse(subscriber.resume(Duration.ofMillis(1)));
            Process second = Processes.pelton("pub", name(), "--subscribers", "1");
            second.getOutputStream().write("two\n".getBytes());
            second.getOutputStream().close();
            assertTrue(subscriber.resume(LIMIT));
            Delivery delivery = subscriber.receive(LIMIT);
            assertEquals("two", new String(delivery.data()));
            assertEquals(1, delivery.number());
            assertThrows(PeltonException.Closed.class, () -> subscriber.receive(LIMIT));
            assertFalse(subscriber.iterator().hasNext());
            assertEquals(0, second.waitFor());
        }
    }

    private static void awaitParked(Thread thread) {
        while (thread.getState() != Thread.State.WAITING && thread.getState() != Thread.State.TIMED_WAITING) {
            assertTrue(thread.isAlive());
            Thread.onSpinWait();
        }
    }

    @Test
    void a_virtual_thread_waits_for_messages_of_a_successor() throws Exception {
        FutureTask<Void> receiving = new FutureTask<>(() -> {
            try (Subscriber subscriber = Subscriber.connect(name(), JOINING)) {
                for (String text : List.of("one", "two", "three")) {
                    assertEquals(text, new String(subscriber.receive(LIMIT).data()));
                    assertEquals(text, new String(subscriber.receive(LIMIT).data()));
                    assertThrows(PeltonException.Closed.class, () -> subscriber.receive(LIMIT));
                    assertEquals(!text.equals("three"), subscriber.resume(text.equals("three") ? Duration.ZERO : LIMIT));
                }
            }
            return null;
        });
        Thread thread = Thread.ofVirtual().start(receiving);
        for (String text : List.of("one", "two", "three")) {
            try (Publisher publisher = Publisher.open(name(), SMALL)) {
                assertTrue(publisher.waitSubscribers(1, LIMIT));
                for (int i = 0; i < 2; i++) {
                    awaitParked(thread);
                    publisher.send(text.getBytes());
                    assertTrue(publisher.waitReleased(LIMIT));
                }
            }
        }
        receiving.get();
    }

    @Test
    void an_interrupt_ends_a_wait_and_loses_nothing() throws Exception {
        for (boolean isVirtual : new boolean[] {false, true}) {
            try (Publisher publisher = Publisher.ofThreads(SMALL);
                    Subscriber subscriber = publisher.subscriber(SubscriberOptions.DEFAULTS)) {
                FutureTask<Void> waiting = new FutureTask<>(() -> {
                    assertThrows(InterruptedException.class, subscriber::receive);
                    return null;
                });
                Thread thread = (isVirtual ? Thread.ofVirtual() : Thread.ofPlatform()).start(waiting);
                thread.interrupt();
                waiting.get();
                publisher.send("kept".getBytes());
                assertEquals("kept", new String(subscriber.receive(LIMIT).data()));
                subscriber.close();
                assertThrows(IllegalStateException.class, subscriber::receive);
            }
        }
    }

    private static void assertFails(int code, Executable call) {
        assertEquals(code, assertThrows(PeltonException.class, call).code());
    }

    @Test
    void a_limit_in_a_directory_stays_until_the_next_publisher() throws Exception {
        String name = "path:" + directory.resolve("limited");
        PublisherOptions limited = SMALL.withHoldMax(Duration.ofMillis(10));
        Publisher.open(name, limited).close();
        assertFails(-9, () -> Subscriber.connect(name, JOINING));
        Subscriber.connect(name, JOINING.withLagAfter(Duration.ofMillis(10))).close();
        Publisher.open(name, SMALL).close();
        try (Subscriber gate = Subscriber.connect(name, JOINING)) {
            assertFails(-9, () -> Publisher.open(name, limited));
        }
        Publisher.open(name, limited).close();
    }

    @Test
    void a_durable_subscription_continues_after_a_kill() throws Exception {
        String name = "path:" + directory.resolve("trades");
        SubscriberOptions durable = JOINING.withDurable("audit");
        assertFails(-15, () -> Subscriber.connect(name, SubscriberOptions.DEFAULTS.withDurable("audit")));
        Publisher publisher = Publisher.open(name, SMALL);
        Process audit = Processes.pelton("sub", name, "--durable", "audit");
        long sent = 0;
        try {
            assertTrue(publisher.waitSubscribers(1, LIMIT));
            publisher.send("1".getBytes());
            assertTrue(publisher.waitReleased(LIMIT));
            SubscriberState state = publisher.subscribers().getFirst();
            assertEquals(audit.pid(), state.pid());
            assertEquals("audit", state.durable());
            assertFails(-17, () -> Subscriber.remove(name, "audit"));
            // C would remove another one.
            assertThrows(IllegalArgumentException.class, () -> Subscriber.remove(name, "audit\0 of before"));
            assertFails(-17, () -> Publisher.open(name));
        } finally {
            audit.destroyForcibly().waitFor();
        }
        // While it is away it gates.
        while (publisher.trySend(new byte[1000])) sent++;
        SubscriberState state = publisher.subscribers().getFirst();
        assertEquals(0, state.pid());
        assertEquals("audit", state.durable());
        assertEquals(sent, state.behind());
        try (Subscriber subscriber = Subscriber.connect(name, durable)) {
            assertTrue(subscriber.continues());
            for (long number = 2; number <= sent + 1; number++)
                assertEquals(number, subscriber.receive().number());
            // The publisher's successor continues.
            publisher.close();
            assertThrows(PeltonException.Closed.class, subscriber::receive);
            assertFalse(subscriber.resume(Duration.ZERO));
            publisher = Publisher.open(name);
            assertTrue(subscriber.resume(LIMIT));
            publisher.send("next".getBytes());
            assertEquals(sent + 2, subscriber.receive().number());
        }
        // It learns how many messages it has missed while away.
        Subscriber.connect(name, durable.withPolicy(Policy.LAG)).close();
        for (int i = 0; i < 200; i++) publisher.send(new byte[1000]);
        try (Subscriber subscriber = Subscriber.connect(name, durable.withPolicy(Policy.LAG))) {
            Delivery delivery = subscriber.receive();
            assertTrue(delivery.missed() > 0);
            assertEquals(sent + 3 + delivery.missed(), delivery.number());
        }
        assertFails(-9, () -> Subscriber.connect(name, durable));
        Subscriber.remove(name, "audit");
        assertFails(-9, () -> Subscriber.remove(name, "audit"));
        publisher.close();
    }
}
