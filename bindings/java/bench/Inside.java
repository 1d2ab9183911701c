package bench;

import java.nio.ByteBuffer;
import java.util.Collections;
import java.util.List;
import java.util.concurrent.TimeUnit;
import org.openjdk.jmh.annotations.Benchmark;
import org.openjdk.jmh.annotations.BenchmarkMode;
import org.openjdk.jmh.annotations.Fork;
import org.openjdk.jmh.annotations.Measurement;
import org.openjdk.jmh.annotations.Mode;
import org.openjdk.jmh.annotations.OperationsPerInvocation;
import org.openjdk.jmh.annotations.OutputTimeUnit;
import org.openjdk.jmh.annotations.Scope;
import org.openjdk.jmh.annotations.Setup;
import org.openjdk.jmh.annotations.State;
import org.openjdk.jmh.annotations.TearDown;
import org.openjdk.jmh.annotations.Warmup;
import org.openjdk.jmh.infra.Blackhole;
import pelton.Client;
import pelton.HeldMessage;
import pelton.Options;
import pelton.Receiver;
import pelton.Service;
import pelton.ThreadChannel;

/**
 * What the binding costs in one process, by JMH: time and bytes allocated for a message of 256 bytes that one thread
 * sends and receives, so that no cache line moves between processors; and for a call to a service on another thread.
 *
 * <p>{@code ./run bench-java} runs all, {@code ./run bench-java byCopy} one, with the options of JMH.
 */
@State(Scope.Thread)
@BenchmarkMode(Mode.AverageTime)
@OutputTimeUnit(TimeUnit.NANOSECONDS)
@Warmup(iterations = 3, time = 1)
@Measurement(iterations = 5, time = 1)
@Fork(1)
public class Inside {
    private static final int SIZE = 256, MANY = 32;

    private final byte[] message = new byte[SIZE];
    private final List<byte[]> many = Collections.nCopies(MANY, message);
    private final ByteBuffer buffer = ByteBuffer.allocate(SIZE);
    private long sum;
    private final Receiver.Handler handler = received -> sum += received.getLong(0);
    private ThreadChannel channel;

    @Setup
    public void open() {
        channel = ThreadChannel.create(Options.DEFAULTS.withCapacity(1 << 20));
    }

    @TearDown
    public void close() {
        channel.close();
    }

    @Benchmark
    public long byHandler() throws Exception {
        channel.sender().send(message);
        channel.receiver().receive(handler);
        return sum;
    }

    @Benchmark
    public byte[] byCopy() throws Exception {
        channel.sender().send(message);
        return channel.receiver().receive();
    }

    @Benchmark
    public ByteBuffer intoBuffer() throws Exception {
        channel.sender().send(message);
        channel.receiver().receive(buffer.clear());
        return buffer;
    }

    @Benchmark
    public void held(Blackhole hole) throws Exception {
        channel.sender().send(message);
        try (HeldMessage held = channel.receiver().receiveHeld()) {
            hole.consume(held.segment());
        }
    }

    @Benchmark
    @OperationsPerInvocation(MANY)
    public long many() throws Exception {
        channel.sender().sendAll(many);
        for (int left = MANY; left > 0; ) left -= channel.receiver().receiveMany(handler, left);
        return sum;
    }

    /** A service on a thread of its own, and its client. */
    @State(Scope.Thread)
    public static class Calling {
        private Service service;
        private Thread serving;
        private Client client;

        @Setup
        public void open() throws Exception {
            // In no directory: a name of this process alone.
            String name = "bench-" + ProcessHandle.current().pid();
            service = Service.listen(name, Options.DEFAULTS.withSpin(true));
            serving = Thread.ofPlatform().daemon().start(() -> {
                try {
                    service.run(request -> request.bytes(), Runnable::run);
                } catch (InterruptedException end) {
                    throw new AssertionError(end);
                }
            });
            client = Client.connect(name, Options.DEFAULTS.withSpin(true));
        }

        @TearDown
        public void close() throws Exception {
            client.close();
            service.stop();
            serving.join();
            service.close();
        }
    }

    @Benchmark
    public byte[] call(Calling calling) throws Exception {
        return calling.client.call(message);
    }
}
