import io.aeron.Aeron;
import io.aeron.AeronCounters;
import io.aeron.ExclusivePublication;
import io.aeron.FragmentAssembler;
import io.aeron.Publication;
import io.aeron.Subscription;
import io.aeron.driver.MediaDriver;
import io.aeron.driver.ThreadingMode;
import io.aeron.logbuffer.BufferClaim;
import io.aeron.logbuffer.FragmentHandler;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.lang.management.ManagementFactory;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.nio.file.DirectoryStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.agrona.DirectBuffer;
import org.agrona.concurrent.BackoffIdleStrategy;
import org.agrona.concurrent.BusySpinIdleStrategy;
import org.agrona.concurrent.IdleStrategy;
import org.agrona.concurrent.UnsafeBuffer;

/**
 * Aeron's IPC in the workloads of pelton-bench: `stream` and `roundtrip`, between two Java processes.
 *
 * <p>As its documentation recommends for throughput and latency: an exclusive publication and `tryClaim`, by which the
 * publisher writes a message in place, without a copy of Aeron's own. The terms' memory is created and touched before
 * the passes (`preTouchMappedMemory`, no sparse files). Terms are of 16 MiB, or of `--capacity`. That is the best of
 * the tested sizes with messages of 256 bytes, one way, on two busy processors: 1 MiB 0.2 M/s, 4 MiB 0.9, 16 MiB 1.9,
 * 64 MiB 0.3. Both endpoints busy-poll by its BusySpinIdleStrategy.
 *
 * <p>The media driver is in the process that receives first, with one thread for all (ThreadingMode.SHARED), which
 * backs off. For IPC it only creates the logs and advances the limit. There are two processors for three threads, so
 * neither process is pinned to one CPU. The driver's directory is in memory. Bounds checks are off, as its
 * documentation recommends for measuring.
 *
 * <p>One to many: each receiver has a subscription of its own, and reads in place; the driver is in the sender's
 * process. With `--wait block`, endpoints back off by Aeron's BackoffIdleStrategy.
 *
 * <p>Before the passes 200,000 messages more are sent than with the other systems (of large ones 2 GiB), or 20,000
 * round trips, so that the measured code is compiled. A message above a fragment's limit, 65,472 bytes, cannot be
 * claimed: it goes by `offer`, which copies it in fragments, and a FragmentAssembler joins them, as its documentation
 * recommends. A message has at most an eighth of a term.
 *
 * <p>The contract with pelton-bench is that of every side. The side compares every message's number and size, and
 * every byte of the warm-up's first and of a stream's last.
 */
public final class AeronSide {
    private static final int WARM_UP = 16;
    private static final int TERM_BYTES = 16 << 20;
    private static final int COMPILED = 200_000;
    private static final int FRAGMENTS = 256;
    private static final int MTU = 65_504;
    /** Of a message that is one fragment. */
    private static final int CLAIM_MAX = MTU - 32;

    private final String job;
    private final int sizeMin;
    private final int sizeMax;
    private final long delayNs;
    private final byte[] pattern;
    private ExclusivePublication out;
    private Subscription in;
    private final BufferClaim claim = new BufferClaim();
    private IdleStrategy idle;
    /** One sender of many receivers, which read in place. */
    private final boolean broadcasts;
    private final int receivers;
    private final UnsafeBuffer copy;
    private final UnsafeBuffer offered;

    // The handler's next number, and the bytes it has received.
    private long number;
    private long whole;
    private long bytes;
    private int seed;
    private final FragmentHandler check;

    public static void main(String[] arguments) throws Exception {
        System.setProperty("agrona.disable.bounds.checks", "true");
        System.setProperty("aeron.disable.bounds.checks", "true");
        try {
            new AeronSide(arguments[1]).run();
        } catch (Throwable error) {
            System.err.println(error);
            System.exit(1);
        }
        System.exit(0);
    }

    private AeronSide(String job) {
        this.job = job;
        sizeMin = (int) number("\"min\"");
        sizeMax = (int) number("\"max\"");
        broadcasts = job.contains("\"kind\":\"broadcast\"");
        receivers = (int) number("\"receivers\"");
        delayNs = number("\"delay_us\"") * 1000;
        if (!job.contains("\"rate\":null")) {
            throw new IllegalArgumentException("it knows no rate: leave out --rate");
        }
        pattern = new byte[sizeMax];
        for (int at = 0; at < sizeMax; at++) {
            pattern[at] = (byte) (at * 31 + (at >> 8) + 7);
        }
        copy = new UnsafeBuffer(new byte[Math.max(sizeMax, 8)]);
        offered = new UnsafeBuffer(pattern.clone());
        check = sizeMax > CLAIM_MAX ? new FragmentAssembler(this::check) : this::check;
    }

    private long number(String name) {
        return Long.parseLong(find(name + ":(-?[0-9]+)"));
    }

    private String find(String text) {
        Matcher matcher = Pattern.compile(text).matcher(job);
        if (!matcher.find()) {
            throw new IllegalArgumentException("the job has no " + text);
        }
        return matcher.group(1);
    }

    private void run() throws Exception {
        String role = find("\"role\":\"([a-z-]+)\"");
        String wait = find("\"wait\":\"([a-z-]+)\"");
        if (!wait.equals("spin") && !wait.equals("block")) {
            throw new IllegalArgumentException("it is not measured with an event loop: write spin or block");
        }
        idle = wait.equals("spin") ? BusySpinIdleStrategy.INSTANCE : new BackoffIdleStrategy();
        int most = Math.min(termBytes() / 8, 16 << 20);
        if (sizeMin < 8 || sizeMax > most) {
            throw new IllegalArgumentException("it is measured with messages of 8 bytes at least, and has at most "
                + most + " with terms of " + termBytes());
        }
        boolean listens = role.equals("receiver") || role.equals("answerer");
        boolean roundTrip = role.equals("asker") || role.equals("answerer");
        String directory = Path.of(find("\"directory\":\"([^\"]+)\""), "aeron").toString();
        MediaDriver driver = null;
        if (broadcasts ? role.equals("sender") : listens) {
            driver = MediaDriver.launchEmbedded(new MediaDriver.Context()
                .aeronDirectoryName(directory)
                .threadingMode(ThreadingMode.SHARED)
                .sharedIdleStrategy(new BackoffIdleStrategy())
                .ipcMtuLength(MTU)
                .ipcTermBufferLength(termBytes())
                .termBufferSparseFile(false)
                .dirDeleteOnStart(false)
                .dirDeleteOnShutdown(false));
        }
        waitFor(Path.of(directory, "cnc.dat"));
        try (Aeron aeron = Aeron.connect(new Aeron.Context().aeronDirectoryName(directory).preTouchMappedMemory(true))) {
            int own = listens ? 1001 : 1002;
            if (roundTrip || !listens) {
                out = aeron.addExclusivePublication("aeron:ipc", own);
            }
            if (roundTrip || listens) {
                in = aeron.addSubscription("aeron:ipc", listens ? 1002 : 1001);
            }
            while ((out != null && !out.isConnected()) || (in != null && in.imageCount() == 0)) {
                Thread.onSpinWait();
            }
            while (broadcasts && out != null && subscribers(aeron) < receivers) {
                Thread.sleep(1);
            }
            long compiled = Math.min(COMPILED, (2L << 30) / sizeMax) / receivers;
            once(role, roundTrip ? compiled / 10 : compiled, WARM_UP, null);
            passes(role, listens);
        }
        if (driver != null) {
            driver.close();
        }
    }

    /** The subscriptions that hold this publication up: each has a counter of its position. */
    private int subscribers(Aeron aeron) {
        int[] found = {0};
        aeron.countersReader().forEach((counter, type, key, label) -> {
            if (type == AeronCounters.DRIVER_SUBSCRIBER_POSITION_TYPE_ID && key.getInt(8) == out.sessionId()) {
                found[0]++;
            }
        });
        return found[0];
    }

    /** The default is the best size. */
    private int termBytes() {
        long capacity = number("\"capacity\"");
        return capacity == 64 << 20 ? TERM_BYTES : (int) Math.min(capacity, 1 << 30);
    }

    private static void waitFor(Path place) throws Exception {
        long until = System.nanoTime() + 20_000_000_000L;
        while (!Files.exists(place)) {
            if (System.nanoTime() > until) {
                throw new IllegalStateException("the driver did not start");
            }
            Thread.sleep(1);
        }
    }

    private void passes(String role, boolean listens) throws Exception {
        BufferedReader orders = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.US_ASCII));
        List<long[]> passes = new ArrayList<>();
        Matcher matcher = Pattern.compile("\"count\":([0-9]+),\"time_each\":(true|false)").matcher(job);
        while (matcher.find()) {
            passes.add(new long[] {Long.parseLong(matcher.group(1)), matcher.group(2).equals("true") ? 1 : 0});
        }
        for (long[] pass : passes) {
            say("\"ready\"");
            if (!"go".equals(orders.readLine())) {
                throw new IllegalStateException("the order was not to go");
            }
            if (listens) {
                say("\"started\"");
            }
            boolean times = pass[1] == 1 && role.equals("asker");
            long[] took = times ? new long[(int) pass[0]] : null;
            double[] before = usage();
            long start = now();
            once(role, pass[0], 0, took);
            long end = now();
            double[] after = usage();
            say(String.format(java.util.Locale.ROOT,
                "{\"start_ns\":%d,\"end_ns\":%d,\"bytes\":%d,\"usage\":{\"cpu_seconds\":%.6f,"
                    + "\"voluntary_switches\":%d,\"involuntary_switches\":%d},\"rounds_ns\":%s}",
                start, end, bytes, after[0] - before[0], (long) (after[1] - before[1]),
                (long) (after[2] - before[2]), took == null ? "[]" : Arrays.toString(took)));
        }
        if (orders.readLine() != null) {
            throw new IllegalStateException("there was an order after the last one");
        }
    }

    private static void say(String line) {
        System.out.println(line);
        System.out.flush();
    }

    /** CLOCK_MONOTONIC, which all systems' sides read: on Linux nanoTime is that clock. */
    private static long now() {
        return System.nanoTime();
    }

    private static double[] usage() throws Exception {
        double[] used = {0, 0, 0};
        var system = (com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
        used[0] = system.getProcessCpuTime() * 1e-9;
        try (DirectoryStream<Path> tasks = Files.newDirectoryStream(Path.of("/proc/self/task"))) {
            for (Path task : tasks) {
                for (String line : Files.readAllLines(task.resolve("status"))) {
                    if (line.startsWith("voluntary_ctxt_switches:")) {
                        used[1] += Long.parseLong(line.substring(24).trim());
                    } else if (line.startsWith("nonvoluntary_ctxt_switches:")) {
                        used[2] += Long.parseLong(line.substring(27).trim());
                    }
                }
            }
        }
        return used;
    }

    /** One pass, with all bytes checked of the messages up to `wholeBelow` and of the last. */
    private void once(String role, long count, long wholeBelow, long[] took) {
        number = 0;
        whole = wholeBelow;
        bytes = 0;
        seed = 1;
        switch (role) {
            case "sender" -> {
                for (long n = 0; n < count; n++) {
                    send(offered, n, nextSize());
                }
            }
            case "receiver" -> {
                last = count - 1;
                while (number < count) {
                    idle.idle(in.poll(check, (int) Math.min(FRAGMENTS, count - number)));
                }
            }
            case "asker" -> {
                last = -1;
                int sizes = 1;
                for (long n = 0; n < count; n++) {
                    // A clock read costs time: only where each round is timed.
                    long start = took == null ? 0 : now();
                    busy(delayNs);
                    sizes = seedAfter(sizes);
                    send(offered, n, sizeOf(sizes));
                    while (number == n) {
                        idle.idle(in.poll(check, 1));
                    }
                    if (took != null) {
                        took[(int) n] = Math.max(now() - start - 2 * delayNs, 0);
                    }
                }
            }
            default -> {
                last = -1;
                while (number < count) {
                    long before = number;
                    idle.idle(in.poll(check, 1));
                    if (number > before) {
                        busy(delayNs);
                        send(copy, before, lastSize);
                    }
                }
            }
        }
    }

    private long last;
    private int lastSize;

    private void check(DirectBuffer buffer, int offset, int length, io.aeron.logbuffer.Header header) {
        int size = nextReceivedSize();
        DirectBuffer message = buffer;
        int start = offset;
        if (!broadcasts) {
            // Copied out, as by all systems here.
            buffer.getBytes(offset, copy, 0, length);
            message = copy;
            start = 0;
        }
        if (length != size || message.getLong(start, ByteOrder.LITTLE_ENDIAN) != number) {
            throw new IllegalStateException("message " + number + " was lost, doubled or out of order");
        }
        if (number < whole || number == last) {
            for (int at = 8; at < length; at++) {
                if (message.getByte(start + at) != pattern[at]) {
                    throw new IllegalStateException("message " + number + " has other bytes than were sent");
                }
            }
        }
        lastSize = length;
        bytes += length;
        number++;
    }

    private int seedAfter(int value) {
        return value * 1664525 + 1013904223;
    }

    private int sizeOf(int value) {
        return sizeMin == sizeMax ? sizeMax : sizeMin + (value >>> 8) % (sizeMax - sizeMin + 1);
    }

    private int nextSize() {
        seed = seedAfter(seed);
        int size = sizeOf(seed);
        bytes += size;
        return size;
    }

    private int nextReceivedSize() {
        seed = seedAfter(seed);
        return sizeOf(seed);
    }

    /** By a claim, in place; a larger message by an offer. The number is written last: a copy would wait for it. */
    private void send(UnsafeBuffer message, long n, int size) {
        if (size > CLAIM_MAX) {
            message.putLong(0, n, ByteOrder.LITTLE_ENDIAN);
        }
        while (true) {
            long position = size > CLAIM_MAX ? out.offer(message, 0, size) : out.tryClaim(size, claim);
            if (position <= 0) {
                waitOrFail(position);
                continue;
            }
            if (size <= CLAIM_MAX) {
                claim.buffer().putBytes(claim.offset(), message, 0, size);
                claim.buffer().putLong(claim.offset(), n, ByteOrder.LITTLE_ENDIAN);
                claim.commit();
            }
            return;
        }
    }

    private void waitOrFail(long position) {
        if (position == Publication.CLOSED || position == Publication.NOT_CONNECTED
            || position == Publication.MAX_POSITION_EXCEEDED) {
            throw new IllegalStateException("the publication ended: " + position);
        }
        idle.idle();
    }

    private static void busy(long ns) {
        if (ns == 0) {
            return;
        }
        long end = now() + ns;
        while (now() < end) {
            Thread.onSpinWait();
        }
    }
}
