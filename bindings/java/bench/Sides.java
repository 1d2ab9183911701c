import io.grpc.CallOptions;
import io.grpc.ManagedChannel;
import io.grpc.MethodDescriptor;
import io.grpc.Server;
import io.grpc.ServerServiceDefinition;
import io.grpc.netty.shaded.io.grpc.netty.NettyChannelBuilder;
import io.grpc.netty.shaded.io.grpc.netty.NettyServerBuilder;
import io.grpc.netty.shaded.io.netty.channel.epoll.EpollDomainSocketChannel;
import io.grpc.netty.shaded.io.netty.channel.epoll.EpollEventLoopGroup;
import io.grpc.netty.shaded.io.netty.channel.epoll.EpollServerDomainSocketChannel;
import io.grpc.netty.shaded.io.netty.channel.unix.DomainSocketAddress;
import io.grpc.stub.ClientCalls;
import io.grpc.stub.ServerCalls;
import java.io.BufferedReader;
import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.io.UncheckedIOException;
import java.lang.foreign.MemorySegment;
import java.lang.management.ManagementFactory;
import java.net.StandardProtocolFamily;
import java.net.UnixDomainSocketAddress;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.ClosedChannelException;
import java.nio.channels.ServerSocketChannel;
import java.nio.channels.SocketChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.DirectoryStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Locale;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicLong;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import net.openhft.chronicle.queue.ChronicleQueue;
import net.openhft.chronicle.queue.ExcerptAppender;
import net.openhft.chronicle.queue.ExcerptTailer;
import net.openhft.chronicle.wire.DocumentContext;
import pelton.Client;
import pelton.Listener;
import pelton.Options;
import pelton.Receiver;
import pelton.Sender;
import pelton.Service;

/**
 * Java in the workloads `stream`, `roundtrip` and `call` of pelton-bench, between two processes: pelton, the JDK's Unix
 * socket with length prefixes, Chronicle Queue's open-source edition, and gRPC over a Unix socket by netty's epoll.
 *
 * <p>As their documentation recommends: a Chronicle tailer busy-polls, a document is written and read in place without
 * an object for it; gRPC's marshallers leave bytes as they are, its executor is the event loop ("directExecutor"), and
 * calls block. pelton handles requests on its service's thread. Each message is copied out, as by all systems.
 *
 * <p>Before the passes 200,000 messages more are sent than with systems of other languages, or 20,000 calls, so that
 * the measured code is compiled. The contract is that of every side: see bench/src/side.rs and payload.rs. The side
 * compares every message's number and size, and every byte of the warm-up's and of a stream's last.
 *
 * <pre>java Sides SYSTEM side JOB</pre>
 */
public final class Sides {
    private static final int WARM_UP = 16, COMPILED = 200_000;
    private static final Duration LIMIT = Duration.ofSeconds(30);

    /** Both directions, or the one that the role has. */
    private interface Link {
        void send(byte[] message, int size) throws Exception;

        /** Waits for a message, and copies it. Returns its size. */
        int receive(byte[] into) throws Exception;
    }

    private interface Caller {
        byte[] call(byte[] request) throws Exception;
    }

    private final String system, job, role;
    private final Path directory;
    private final int sizeMin, size;
    private final boolean isSpinning;
    private final byte[] pattern;

    public static void main(String[] arguments) {
        try {
            new Sides(arguments[0], arguments[2]).run();
        } catch (Throwable failure) {
            System.err.println(failure);
            System.exit(1);
        }
        System.exit(0);
    }

    private Sides(String system, String job) {
        this.system = system;
        this.job = job;
        role = find("\"role\":\"([a-z-]+)\"");
        directory = Path.of(find("\"directory\":\"([^\"]+)\""));
        isSpinning = find("\"wait\":\"([a-z-]+)\"").equals("spin");
        sizeMin = (int) number("\"min\"");
        size = (int) number("\"max\"");
        if (sizeMin < 8 || sizeMin != size && (role.equals("client") || role.equals("service")))
            throw new IllegalArgumentException("its sides in Java have messages from 8 bytes, and calls of one size");
        if (number("\"delay_us\"") != 0 || !job.contains("\"rate\":null"))
            throw new IllegalArgumentException("its sides in Java never rest: leave out --delay and --rate");
        pattern = new byte[size];
        for (int at = 0; at < size; at++) pattern[at] = (byte) (at * 31 + (at >> 8) + 7);
    }

    private long number(String name) {
        return Long.parseLong(find(name + ":(-?[0-9]+)"));
    }

    private String find(String text) {
        Matcher matcher = Pattern.compile(text).matcher(job);
        if (!matcher.find()) throw new IllegalArgumentException("the job has no " + text);
        return matcher.group(1);
    }

    private void run() throws Exception {
        long compiled = Math.min(COMPILED, (2L << 30) / size);
        switch (role) {
            case "sender", "receiver", "asker", "answerer" -> {
                Link link = link();
                boolean isStream = role.equals("sender") || role.equals("receiver");
                exchange(link, isStream ? compiled : compiled / 10, WARM_UP, null);
                passes(pass -> {
                    return exchange(link, pass.count, 0, pass.took);
                });
            }
            case "client" -> ask(compiled / 10);
            case "service" -> answer(compiled / 10);
            default -> throw new IllegalArgumentException("a side in Java is no " + role);
        }
    }

    private record Pass(long count, long[] took) {}

    private interface Once {
        /** Returns the bytes. */
        long make(Pass pass) throws Exception;
    }

    private void passes(Once once) throws Exception {
        BufferedReader orders = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.US_ASCII));
        Matcher matcher = Pattern.compile("\"count\":([0-9]+),\"time_each\":(true|false)").matcher(job);
        while (matcher.find()) {
            int count = Integer.parseInt(matcher.group(1));
            boolean times = matcher.group(2).equals("true") && (role.equals("asker") || role.equals("client"));
            Pass pass = new Pass(count, times ? new long[count] : null);
            say("\"ready\"");
            if (!"go".equals(orders.readLine())) throw new IllegalStateException("the order was not to go");
            if (List.of("receiver", "answerer", "service").contains(role)) say("\"started\"");
            double[] before = usage();
            long start = System.nanoTime(), bytes = once.make(pass), end = System.nanoTime();
            double[] after = usage();
            say(String.format(
                    Locale.ROOT,
                    "{\"start_ns\":%d,\"end_ns\":%d,\"bytes\":%d,\"usage\":{\"cpu_seconds\":%.6f,"
                            + "\"voluntary_switches\":%d,\"involuntary_switches\":%d},\"rounds_ns\":%s}",
                    start, end, bytes, after[0] - before[0], (long) (after[1] - before[1]),
                    (long) (after[2] - before[2]), pass.took == null ? "[]" : Arrays.toString(pass.took)));
        }
        if (orders.readLine() != null) throw new IllegalStateException("there was an order after the last one");
    }

    private static void say(String line) {
        System.out.println(line);
        System.out.flush();
    }

    private static double[] usage() throws IOException {
        double[] used = {0, 0, 0};
        var machine = (com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
        used[0] = machine.getProcessCpuTime() * 1e-9;
        try (DirectoryStream<Path> tasks = Files.newDirectoryStream(Path.of("/proc/self/task"))) {
            for (Path task : tasks)
                for (String line : Files.readAllLines(task.resolve("status"))) {
                    if (line.startsWith("voluntary_ctxt_switches:")) used[1] += Long.parseLong(line.substring(24).trim());
                    else if (line.startsWith("nonvoluntary_ctxt_switches:"))
                        used[2] += Long.parseLong(line.substring(27).trim());
                }
        }
        return used;
    }

    /**
     * One pass of a stream or of round trips, with all bytes checked of the messages below {@code whole}, and of the
     * last. Returns the bytes. The sizes are the same sequence as in all sides: that of limits.c.
     */
    private long exchange(Link link, long count, long whole, long[] took) throws Exception {
        byte[] message = pattern.clone(), received = new byte[size];
        ByteBuffer number = ByteBuffer.wrap(message).order(ByteOrder.LITTLE_ENDIAN);
        boolean asks = role.equals("asker"), answers = role.equals("answerer");
        long bytes = 0;
        int seed = 1;
        for (long n = 0; n < count; n++) {
            seed = seed * 1664525 + 1013904223;
            int next = sizeMin == size ? size : sizeMin + (seed >>> 8) % (size - sizeMin + 1);
            bytes += next;
            long start = took == null ? 0 : System.nanoTime();
            if (asks || role.equals("sender")) {
                number.putLong(0, n);
                link.send(message, next);
                if (!asks) continue;
            }
            int length = link.receive(received);
            if (answers) link.send(received, length);
            if (took != null) took[(int) n] = System.nanoTime() - start;
            check(received, length, next, n, n < whole || !asks && !answers && n == count - 1);
        }
        return bytes;
    }

    private void check(byte[] received, int length, int wanted, long n, boolean whole) {
        if (length != wanted || ByteBuffer.wrap(received).order(ByteOrder.LITTLE_ENDIAN).getLong(0) != n)
            throw new IllegalStateException("message " + n + " was lost, doubled or out of order");
        if (whole && !Arrays.equals(received, 8, length, pattern, 8, length))
            throw new IllegalStateException("message " + n + " has other bytes than were sent");
    }

    private Link link() throws Exception {
        boolean isFirst = role.equals("receiver") || role.equals("answerer");
        boolean both = role.equals("asker") || role.equals("answerer");
        return switch (system) {
            case "pelton-java" -> pelton(isFirst, both);
            case "java-sock-stream" -> new Framed(isFirst ? accepted() : connected());
            case "chronicle-queue" -> chronicle(isFirst, both);
            default -> throw new IllegalArgumentException(system + " is no system of Java's that exchanges messages");
        };
    }

    private Options options() {
        return Options.DEFAULTS.withCapacity(number("\"capacity\"")).withSpin(isSpinning);
    }

    private Link pelton(boolean isFirst, boolean both) throws Exception {
        String there = "unix:" + directory.resolve("there"), back = "unix:" + directory.resolve("back");
        Receiver receiver = null;
        Sender sender = null;
        if (isFirst) {
            try (Listener listener = Listener.listen(there, options())) {
                receiver = listener.acceptReceiver();
            }
        } else {
            sender = Sender.connect(there, options().withTimeout(LIMIT));
        }
        if (both && isFirst) {
            sender = Sender.connect(back, options().withTimeout(LIMIT));
        } else if (both) {
            try (Listener listener = Listener.listen(back, options())) {
                receiver = listener.acceptReceiver();
            }
        }
        return new Pelton(sender, receiver);
    }

    private static final class Pelton implements Link {
        private final Sender sender;
        private final Receiver receiver;
        private byte[] into;
        private int length;
        private final Receiver.Handler copy = message -> {
            length = (int) message.size();
            message.copyTo(0, into, 0, length);
        };

        Pelton(Sender sender, Receiver receiver) {
            this.sender = sender;
            this.receiver = receiver;
        }

        @Override
        public void send(byte[] message, int size) throws InterruptedException {
            if (size == message.length) sender.send(message);
            else sender.send(MemorySegment.ofArray(message).asSlice(0, size));
        }

        @Override
        public int receive(byte[] into) throws InterruptedException {
            this.into = into;
            receiver.receive(copy);
            return length;
        }
    }

    private UnixDomainSocketAddress socket() {
        return UnixDomainSocketAddress.of(directory.resolve("socket"));
    }

    private SocketChannel accepted() throws IOException {
        try (ServerSocketChannel server = ServerSocketChannel.open(StandardProtocolFamily.UNIX)) {
            server.bind(socket());
            return server.accept();
        }
    }

    private SocketChannel connected() throws Exception {
        for (long until = System.nanoTime() + LIMIT.toNanos(); ; Thread.sleep(1)) {
            try {
                return SocketChannel.open(socket());
            } catch (IOException absent) {
                if (System.nanoTime() > until) throw absent;
            }
        }
    }

    /** A Unix socket, with length prefixes: one write for each message, and reads of what has come. */
    private final class Framed implements Link {
        private final SocketChannel socket;
        private final ByteBuffer out = ByteBuffer.allocateDirect(4 + size);
        private final ByteBuffer in = ByteBuffer.allocateDirect(Math.max(64 << 10, 4 + size)).flip();

        Framed(SocketChannel socket) {
            this.socket = socket;
        }

        @Override
        public void send(byte[] message, int size) throws IOException {
            out.clear().putInt(size).put(message, 0, size).flip();
            while (out.hasRemaining()) socket.write(out);
        }

        @Override
        public int receive(byte[] into) throws IOException {
            fill(4);
            int length = in.getInt();
            fill(length);
            in.get(into, 0, length);
            return length;
        }

        private void fill(int bytes) throws IOException {
            if (in.remaining() >= bytes) return;
            in.compact();
            while (in.position() < bytes) if (socket.read(in) < 0) throw new ClosedChannelException();
            in.flip();
        }
    }

    private Link chronicle(boolean isFirst, boolean both) {
        ExcerptTailer tailer = isFirst || both ? queue(isFirst ? "there" : "back").createTailer() : null;
        ExcerptAppender appender = !isFirst || both ? queue(isFirst ? "back" : "there").createAppender() : null;
        return new Link() {
            @Override
            public void send(byte[] message, int size) {
                try (DocumentContext document = appender.writingDocument()) {
                    document.wire().bytes().write(message, 0, size);
                }
            }

            @Override
            public int receive(byte[] into) {
                while (true) {
                    try (DocumentContext document = tailer.readingDocument()) {
                        if (document.isPresent()) return document.wire().bytes().read(into);
                    }
                    Thread.onSpinWait();
                }
            }
        };
    }

    private ChronicleQueue queue(String name) {
        return ChronicleQueue.singleBuilder(directory.resolve(name)).build();
    }

    private static final MethodDescriptor.Marshaller<byte[]> BYTES = new MethodDescriptor.Marshaller<>() {
        @Override
        public InputStream stream(byte[] bytes) {
            return new ByteArrayInputStream(bytes);
        }

        @Override
        public byte[] parse(InputStream stream) {
            try {
                return stream.readAllBytes();
            } catch (IOException failure) {
                throw new UncheckedIOException(failure);
            }
        }
    };
    private static final MethodDescriptor<byte[], byte[]> ECHO = MethodDescriptor.newBuilder(BYTES, BYTES)
            .setFullMethodName("bench/echo")
            .setType(MethodDescriptor.MethodType.UNARY)
            .build();

    private Caller caller() throws Exception {
        switch (system) {
            case "pelton-java" -> {
                Client client = Client.connect("unix:" + directory.resolve("there"), options().withTimeout(LIMIT));
                return client::call;
            }
            case "java-sock-stream" -> {
                Framed link = new Framed(connected());
                byte[] reply = new byte[size];
                return request -> {
                    // It has one call in flight.
                    synchronized (link) {
                        link.send(request, size);
                        return link.receive(reply) == size ? reply.clone() : null;
                    }
                };
            }
            case "java-grpc" -> {
                ManagedChannel channel = NettyChannelBuilder.forAddress(
                                new DomainSocketAddress(directory.resolve("socket").toFile()))
                        .channelType(EpollDomainSocketChannel.class)
                        .eventLoopGroup(new EpollEventLoopGroup(1))
                        .directExecutor()
                        .usePlaintext()
                        .maxInboundMessageSize(Integer.MAX_VALUE)
                        .build();
                CallOptions waiting = CallOptions.DEFAULT.withWaitForReady();
                return request -> ClientCalls.blockingUnaryCall(channel, ECHO, waiting, request);
            }
            default -> throw new IllegalArgumentException(system + " makes no calls");
        }
    }

    private void ask(long compiled) throws Exception {
        int many = (int) Math.max(1, number("\"in_flight\""));
        Caller caller = caller();
        Once calls = pass -> {
            List<Thread> threads = new ArrayList<>();
            AtomicLong done = new AtomicLong();
            for (int worker = 0; worker < many; worker++) {
                long first = worker;
                Runnable work = () -> {
                    byte[] request = pattern.clone();
                    ByteBuffer number = ByteBuffer.wrap(request).order(ByteOrder.LITTLE_ENDIAN);
                    try {
                        for (long n = first; n < pass.count; n += many) {
                            long start = pass.took == null ? 0 : System.nanoTime();
                            number.putLong(0, n);
                            byte[] reply = caller.call(request);
                            if (pass.took != null) pass.took[(int) n] = System.nanoTime() - start;
                            if (!Arrays.equals(request, reply))
                                throw new IllegalStateException("the reply to call " + n + " has other bytes");
                            done.getAndIncrement();
                        }
                    } catch (Exception failure) {
                        System.err.println(failure);
                    }
                };
                if (many == 1) work.run();
                else threads.add(Thread.ofVirtual().start(work));
            }
            for (Thread thread : threads) thread.join();
            if (done.get() != pass.count) throw new IllegalStateException("a call failed");
            return pass.count * size;
        };
        calls.make(new Pass(compiled, null));
        passes(calls);
    }

    /** Counts the replies, by which a pass ends: the next one begins after the last of these. */
    private final class Tally {
        private final long[] ends;
        private final AtomicLong served = new AtomicLong();
        private final Semaphore over = new Semaphore(0);

        Tally(long compiled) {
            List<Long> all = new ArrayList<>(List.of(compiled));
            Matcher matcher = Pattern.compile("\"count\":([0-9]+)").matcher(job);
            while (matcher.find())
                if (!matcher.group(1).equals("0")) all.add(all.getLast() + Long.parseLong(matcher.group(1)));
            ends = all.stream().mapToLong(it -> it).toArray();
        }

        byte[] reply(byte[] request) {
            if (Arrays.binarySearch(ends, served.incrementAndGet()) >= 0) over.release();
            return request;
        }
    }

    private void answer(long compiled) throws Exception {
        Tally tally = new Tally(compiled);
        serve(tally);
        tally.over.acquire();
        passes(pass -> {
            if (pass.count > 0) tally.over.acquire();
            return pass.count * size;
        });
    }

    private void serve(Tally tally) throws Exception {
        switch (system) {
            case "pelton-java" -> {
                Service service = Service.listen("unix:" + directory.resolve("there"), options());
                started(() -> service.run(request -> tally.reply(request.bytes()), Runnable::run));
            }
            case "java-sock-stream" -> started(() -> {
                Framed link = new Framed(accepted());
                byte[] bytes = new byte[size];
                while (true) {
                    link.receive(bytes);
                    link.send(tally.reply(bytes), size);
                }
            });
            case "java-grpc" -> {
                Server server = NettyServerBuilder.forAddress(
                                new DomainSocketAddress(directory.resolve("socket").toFile()))
                        .channelType(EpollServerDomainSocketChannel.class)
                        .bossEventLoopGroup(new EpollEventLoopGroup(1))
                        .workerEventLoopGroup(new EpollEventLoopGroup(1))
                        .directExecutor()
                        .maxInboundMessageSize(Integer.MAX_VALUE)
                        .addService(ServerServiceDefinition.builder("bench")
                                .addMethod(ECHO, ServerCalls.asyncUnaryCall((request, observer) -> {
                                    observer.onNext(tally.reply(request));
                                    observer.onCompleted();
                                }))
                                .build())
                        .build();
                server.start();
            }
            default -> throw new IllegalArgumentException(system + " serves no calls");
        }
    }

    private interface Loop {
        void run() throws Exception;
    }

    private static void started(Loop loop) {
        Thread.ofPlatform().daemon().start(() -> {
            try {
                loop.run();
            } catch (ClosedChannelException ended) {
                // The client is done.
            } catch (Exception failure) {
                System.err.println(failure);
                System.exit(1);
            }
        });
    }
}
