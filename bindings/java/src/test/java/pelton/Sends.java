package pelton;

import java.time.Duration;

/**
 * A process to kill: it sends numbers under a name, writes each as a line when it is sent, and waits for the end of its
 * input.
 */
final class Sends {
    private Sends() {}

    public static void main(String[] arguments) throws Exception {
        Options options = Options.DEFAULTS.withTimeout(Duration.ofSeconds(30));
        try (Sender sender =
                Sender.connect(arguments[0], options.withCreate(arguments[0].startsWith("path:")))) {
            for (int i = 0; i < Integer.parseInt(arguments[1]); i++) {
                sender.send(Integer.toString(i).getBytes());
                Lines.write(Integer.toString(i));
            }
            while (System.in.read() >= 0) {}
        }
    }
}
