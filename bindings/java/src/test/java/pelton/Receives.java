package pelton;

import java.time.Duration;

/** A process to kill: it writes each message under a name as a line before it is released, until the sender's end. */
final class Receives {
    private Receives() {}

    public static void main(String[] arguments) throws Exception {
        Options options = Options.DEFAULTS.withTimeout(Duration.ofSeconds(30));
        try (Receiver receiver =
                Receiver.connect(arguments[0], options.withCreate(arguments[0].startsWith("path:")))) {
            while (true) receiver.receive(message -> Lines.write(new String(message.toArray())));
        } catch (PeltonException.Closed end) {
            Lines.write("end");
        }
    }
}
