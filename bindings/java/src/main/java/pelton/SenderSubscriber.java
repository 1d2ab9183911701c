package pelton;

import java.util.ArrayDeque;
import java.util.Objects;
import java.util.concurrent.CancellationException;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Flow;
import org.jspecify.annotations.Nullable;

/**
 * Sends what a publisher publishes, on a virtual thread, and requests more only when there is space in the lane: a slow
 * receiver slows the publisher. At most 64 messages are here. It closes the sender at the end: after the last message
 * when the publisher completes or fails, immediately when sending fails, which cancels the subscription.
 *
 * <p>Subscribe it once: a second subscription is cancelled. The arrays must not change before they are sent.
 */
public final class SenderSubscriber implements Flow.Subscriber<byte[]> {
    /** Requested together, when as many as that have been sent of twice as many. */
    private static final int REQUEST = 32;

    private final Sender sender;
    private final CompletableFuture<@Nullable Void> sent = new CompletableFuture<>();
    // Guarded by this.
    private final ArrayDeque<byte[]> messages = new ArrayDeque<>();
    private Flow.@Nullable Subscription subscription;
    private boolean isEnded;
    private @Nullable Throwable failure;

    SenderSubscriber(Sender sender) {
        this.sender = sender;
    }

    /**
     * Returns the future that completes when the publisher has completed, all is sent, and the sender is closed. It
     * fails with the publisher's failure, or with what {@link Sender#send(byte[])} throws. To cancel it cancels the
     * subscription and closes the sender.
     */
    public CompletableFuture<@Nullable Void> sent() {
        return sent;
    }

    /** Begins to request messages. Does not wait. */
    @Override
    public void onSubscribe(Flow.Subscription subscription) {
        Objects.requireNonNull(subscription, "subscription");
        synchronized (this) {
            if (this.subscription == null) {
                this.subscription = subscription;
                Thread thread = Thread.ofVirtual().name("pelton-subscriber").start(() -> run(subscription));
                sent.whenComplete((nothing, thrown) -> {
                    if (thrown instanceof CancellationException) thread.interrupt();
                });
                return;
            }
        }
        subscription.cancel();
    }

    /** Takes the message to send it. Does not wait. */
    @Override
    public synchronized void onNext(byte[] message) {
        messages.add(Objects.requireNonNull(message, "message"));
        notifyAll();
    }

    /** Ends the sending after the messages that have come. Does not wait. */
    @Override
    public synchronized void onError(Throwable failure) {
        this.failure = Objects.requireNonNull(failure, "failure");
        onComplete();
    }

    /** Ends the sending after the messages that have come. Does not wait. */
    @Override
    public synchronized void onComplete() {
        isEnded = true;
        notifyAll();
    }

    private void run(Flow.Subscription subscription) {
        Throwable failure;
        try {
            subscription.request(2 * REQUEST);
            int count = 0;
            for (byte[] message; (message = next()) != null; ) {
                sender.send(message);
                if (++count % REQUEST == 0) subscription.request(REQUEST);
            }
            sender.close();
            synchronized (this) {
                failure = this.failure;
            }
        } catch (Throwable thrown) {
            failure = thrown;
            subscription.cancel();
            sender.close();
        }
        if (failure == null) sent.complete(null);
        else sent.completeExceptionally(failure);
    }

    private synchronized byte @Nullable [] next() throws InterruptedException {
        while (messages.isEmpty() && !isEnded) wait();
        return messages.poll();
    }
}
