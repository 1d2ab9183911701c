package pelton;

import java.time.Duration;

/** A process to kill: it sends numbers under a name, prints a line, and waits for the end of its input. */
final class Sends {
    private Sends() {}

    public static void main(String[] arguments) throws Exception {
        try (Sender sender = Sender.connect(
                arguments[0], Options.DEFAULTS.withTimeout(Duration.ofSeconds(30)))) {
            for (int i = 0; i < Integer.parseInt(arguments[1]); i++) sender.send(Integer.toString(i).getBytes());
            System.out.println("sent");
            while (System.in.read() >= 0) {}
        }
    }
}
