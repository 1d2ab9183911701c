package pelton;

import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.concurrent.Callable;
import java.util.concurrent.Flow;
import java.util.concurrent.FutureTask;
import org.reactivestreams.tck.TestEnvironment;

/** What the tests of Reactive Streams share. */
final class Streams {
    private Streams() {}

    /**
     * Waits so long for a signal, and for none to come. The last is the interval at which it checks for an error, and
     * in effect the time for one: this version ends the wait after the first check.
     */
    static TestEnvironment environment() {
        return new TestEnvironment(30_000, 20, 1_000);
    }

    record Pair(Sender sender, Receiver receiver) {}

    static Pair pair() {
        try {
            Path directory = Files.createTempDirectory("pelton");
            String name = "unix:" + directory.resolve("socket");
            try (Listener listener = Listener.listen(name)) {
                Callable<Sender> connect = () ->
                        Sender.connect(name, Options.DEFAULTS.withTimeout(Duration.ofSeconds(30)));
                FutureTask<Sender> sender = new FutureTask<>(connect);
                Thread.startVirtualThread(sender);
                Receiver receiver = listener.acceptReceiver();
                return new Pair(sender.get(), receiver);
            } finally {
                Files.deleteIfExists(directory.resolve("socket"));
                Files.delete(directory);
            }
        } catch (Exception failure) {
            throw new AssertionError(failure);
        }
    }

    static <T> Flow.Subscriber<T> cancels() {
        return new Flow.Subscriber<>() {
            @Override
            public void onSubscribe(Flow.Subscription subscription) {
                subscription.cancel();
            }

            @Override
            public void onNext(T item) {}

            @Override
            public void onError(Throwable failure) {}

            @Override
            public void onComplete() {}
        };
    }
}
