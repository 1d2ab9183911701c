import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.zip.CRC32;
import pelton.Call;
import pelton.Client;
import pelton.Listener;
import pelton.Options;
import pelton.PeltonException;
import pelton.Receiver;
import pelton.RecordFile;
import pelton.RecordReader;
import pelton.Sender;
import pelton.Service;

/** The conformance driver in Java. ../README.md has the command line, the messages and the report. */
final class Driver {
    private static final Duration LIMIT =
            Duration.ofSeconds(Long.parseLong(System.getenv().getOrDefault("PELTON_SECONDS", "10")));
    private static final int DAMAGED = -32, TORN = -33, NOT_A_RECORD_FILE = -31;

    /** Each command's values of THEN. */
    private static final Map<String, List<String>> COMMANDS = Map.of(
            "send", List.of("close", "die", "resume", "traced"),
            "recv", List.of("close", "died", "die", "rest", "traced"),
            "gather", List.of(),
            "call", List.of(),
            "serve", List.of(),
            "stream", List.of(),
            "serve-stream", List.of(),
            "write-records", List.of(),
            "read-records", List.of());

    private final String verb, name, then;
    private final int count;
    private final int[] sizes;
    private long messages, bytes, checksum;

    private Driver(String verb, String name, int count, int[] sizes, String then) {
        this.verb = verb;
        this.name = name;
        this.count = count;
        this.sizes = sizes;
        this.then = then;
    }

    private byte[] message(long number) {
        byte[] message = new byte[sizes[(int) (number % sizes.length)]];
        for (int i = 0; i < message.length; i++) message[i] = (byte) ('a' + (number + i) % 26);
        return message;
    }

    /** That of a message: with "traced", all but each third have one. */
    private String traceparent(long number) {
        if (!then.equals("traced") || number % 3 == 0) return null;
        return String.format("00-%032x-%016x-%02x", number + 1, number + 1, number % 256);
    }

    private static long crc(byte[] message) {
        CRC32 crc = new CRC32();
        crc.update(message);
        return crc.getValue();
    }

    private synchronized void add(byte[] message) {
        messages++;
        bytes += message.length;
        checksum = checksum + crc(message) & 0xffffffffL;
    }

    /** Adds the next message, unless it is another one. */
    private void addExpected(byte[] found) {
        if (messages == count || !Arrays.equals(found, message(messages)))
            throw new IllegalStateException(
                    "message " + messages + " of " + count + ": found another one, of " + found.length + " bytes");
        add(found);
    }

    private void checkCount() {
        if (messages != count)
            throw new IllegalStateException("found " + messages + " messages, expected " + count);
    }

    private void report(String more) {
        System.out.printf("ok %s %d messages %d bytes checksum %08x%s%n", verb, messages, bytes, checksum, more);
        System.out.flush();
    }

    private void die() throws Exception {
        report("");
        String me = Long.toString(ProcessHandle.current().pid());
        new ProcessBuilder("kill", "-KILL", me).start().waitFor();
        throw new IllegalStateException("SIGKILL did not end this process");
    }

    private Options options() {
        Options options = Options.DEFAULTS.withTraced(then.equals("traced"));
        return name.startsWith("path:") ? options.withCreate(true) : options.withTimeout(LIMIT);
    }

    private interface Step {
        boolean isDone() throws InterruptedException;
    }

    /** Repeats a step of the sender with the receiver's successor, which gets what its predecessor has not released. */
    private void resumed(Sender sender, Step step) throws InterruptedException {
        while (true) {
            try {
                if (!step.isDone()) throw new IllegalStateException("the receiver does not read");
                return;
            } catch (PeltonException.PeerDied died) {
                if (!then.equals("resume")) throw died;
                if (!sender.resume(LIMIT)) throw new IllegalStateException("the receiver has no successor", died);
            }
        }
    }

    private void send() throws Exception {
        try (Sender sender = Sender.connect(name, options())) {
            for (int i = 0; i < count; i++) {
                byte[] message = message(i);
                String span = traceparent(i);
                resumed(sender, () ->
                        span == null ? sender.send(message, LIMIT) : sender.sendTraced(message, span, LIMIT));
                add(message);
            }
            if (then.equals("die")) die();
            resumed(sender, () -> sender.waitReleased(LIMIT));
        }
    }

    private Receiver openReceiver() throws InterruptedException {
        if (name.startsWith("path:")) return Receiver.connect(name, options());
        try (Listener listener = Listener.listen(name)) {
            Receiver receiver = listener.acceptReceiver(LIMIT);
            if (receiver == null) throw new IllegalStateException("no sender has connected");
            return receiver;
        }
    }

    private void receive() throws Exception {
        List<Long> rest = new ArrayList<>();
        try (Receiver receiver = openReceiver()) {
            while (true) {
                byte[] message;
                try {
                    message = receiver.receive(LIMIT);
                } catch (PeltonException.PeerDied died) {
                    if (then.equals("died")) break;
                    throw died;
                } catch (PeltonException.Closed closed) {
                    if (then.equals("died")) throw new IllegalStateException("expected the sender's death", closed);
                    break;
                }
                if (message == null) throw new IllegalStateException("the sender sends nothing");
                if (then.equals("rest")) {
                    add(message);
                    rest.add(crc(message));
                    continue;
                }
                String span = receiver.traceparent();
                if (!Objects.equals(span, traceparent(messages)))
                    throw new IllegalStateException("message " + messages + ": found the traceparent " + span);
                addExpected(message);
                if (then.equals("die") && messages == count) die();
            }
        }
        if (!then.equals("rest")) {
            checkCount();
            return;
        }
        for (int i = 0; i < rest.size(); i++)
            if (rest.size() > count || rest.get(i) != crc(message(count - rest.size() + i)))
                throw new IllegalStateException("the " + rest.size() + " messages are not the last of " + count);
        if (rest.isEmpty()) throw new IllegalStateException("found no message, expected the last of " + count);
    }

    private void gather() throws Exception {
        try (Receiver receiver = Receiver.gather(name, Options.DEFAULTS)) {
            while (messages < count) {
                byte[] message = receiver.receive(LIMIT);
                if (message == null) throw new IllegalStateException("found " + messages + " messages in time");
                System.out.write(message, 0, Math.min(sizes[0], message.length));
                System.out.println();
                System.out.flush();
                add(message);
            }
        }
    }

    private void call() throws Exception {
        try (Client client = Client.connect(name, options())) {
            for (int i = 0; i < count; i++) addExpected(client.call(message(i), LIMIT));
        }
    }

    private void stream() throws Exception {
        try (Client client = Client.connect(name, options());
                Call call = client.stream(message(0))) {
            for (byte[] part : call) addExpected(part);
        }
        checkCount();
    }

    /** Serves until the count is reached, and every client has its replies. */
    private void serve(Service.Handler handler) throws Exception {
        try (Service service = Service.listen(name)) {
            Thread limit = Thread.startVirtualThread(() -> {
                try {
                    Thread.sleep(LIMIT);
                    service.stop();
                } catch (InterruptedException complete) {
                    // The count is checked below.
                }
            });
            service.run(request -> {
                if (request.isNotification()) return null;
                byte[] reply = handler.handle(request);
                if (isComplete()) service.drain();
                return reply;
            });
            limit.interrupt();
            limit.join();
        }
        checkCount();
    }

    private synchronized boolean isComplete() {
        return messages >= count;
    }

    private void writeRecords() {
        try (RecordFile file = RecordFile.open(Path.of(name))) {
            for (int i = 0; i < count; i++) {
                file.append(message(i));
                add(message(i));
            }
        }
    }

    /** Reads the file to its end. Returns the rest of the report. */
    private String readRecords() {
        int damaged = 0;
        boolean isOpen = false;
        try (RecordReader reader = RecordReader.open(Path.of(name))) {
            isOpen = true;
            while (true) {
                try {
                    for (byte[] message : reader) add(message);
                    return " damaged " + damaged + " end";
                } catch (PeltonException failure) {
                    if (failure.code() == TORN) return " damaged " + damaged + " torn";
                    if (failure.code() != DAMAGED) throw failure;
                    damaged++;
                }
            }
        } catch (PeltonException failure) {
            if (failure.code() != NOT_A_RECORD_FILE) throw failure;
            return " damaged " + damaged + (isOpen ? " later" : " refused");
        }
    }

    private String run() throws Exception {
        switch (verb) {
            case "send" -> send();
            case "recv" -> receive();
            case "gather" -> gather();
            case "call" -> call();
            case "stream" -> stream();
            case "serve" ->
                serve(request -> {
                    add(request.bytes());
                    return request.bytes();
                });
            case "serve-stream" ->
                serve(request -> {
                    for (int i = 0; i < count; i++) {
                        request.part(message(i));
                        add(message(i));
                    }
                    return null;
                });
            case "write-records" -> writeRecords();
            default -> {
                return readRecords();
            }
        }
        return "";
    }

    private static Driver of(String verb, List<String> given) {
        List<String> thens = COMMANDS.get(verb);
        if (verb.equals("read-records") && given.size() == 1) return new Driver(verb, given.get(0), 0, new int[1], "");
        if (given.size() < 3 || given.size() > 4 || verb.equals("read-records")) return null;
        String then = given.size() == 4 ? given.get(3) : "close";
        if (given.size() == 4 && !thens.contains(then)) return null;
        try {
            int[] sizes = Arrays.stream(given.get(2).split(",")).mapToInt(Integer::parseInt).toArray();
            return new Driver(verb, given.get(0), Integer.parseInt(given.get(1)), sizes, then);
        } catch (NumberFormatException wrong) {
            return null;
        }
    }

    private static void unsupported(String what, String reason) {
        System.out.println("unsupported " + what + ": " + reason);
        System.exit(3);
    }

    public static void main(String[] arguments) {
        String verb = arguments.length == 0 ? "" : arguments[0];
        List<String> given = List.of(arguments).subList(Math.min(1, arguments.length), arguments.length);
        if (verb.equals("vectors")) unsupported(verb, "libpelton, which it uses, is tested with the vectors");
        if (!COMMANDS.containsKey(verb)) unsupported(verb, "this driver does not have it");
        boolean isFile = verb.endsWith("-records");
        if (!given.isEmpty() && given.get(0).startsWith("path:") && COMMANDS.get(verb).isEmpty() && !isFile)
            unsupported(verb + " path", "a directory has one sender and one receiver");
        Driver driver = of(verb, given);
        if (driver == null) {
            System.err.println("usage: driver " + verb + " NAME COUNT SIZES " + String.join("|", COMMANDS.get(verb)));
            System.exit(2);
        }
        try {
            driver.report(driver.run());
        } catch (Exception failure) {
            failure.printStackTrace();
            System.exit(1);
        }
    }
}
