package pelton;

import java.lang.System.Logger.Level;
import java.util.Iterator;
import java.util.Objects;
import java.util.concurrent.Flow;
import java.util.concurrent.atomic.AtomicBoolean;
import org.jspecify.annotations.Nullable;

/**
 * Publishes what an iterator returns, to one subscriber, on a virtual thread. Takes a message only when one is
 * requested; finds the end also without a request. Closes the source before the last signal.
 */
final class MessagePublisher implements Flow.Publisher<byte[]> {
    private final Iterator<byte[]> messages;
    private final Runnable closeSource;
    private final AtomicBoolean isSubscribed = new AtomicBoolean();

    /** {@code hasNext} may wait, and an interrupt must end that; the next {@code next} takes what it found. */
    MessagePublisher(Iterator<byte[]> messages, Runnable closeSource) {
        this.messages = messages;
        this.closeSource = closeSource;
    }

    @Override
    public void subscribe(Flow.Subscriber<? super byte[]> subscriber) {
        Objects.requireNonNull(subscriber, "subscriber");
        if (isSubscribed.compareAndSet(false, true)) {
            Thread.ofVirtual().name("pelton-publisher").start(new Subscription(subscriber));
            return;
        }
        subscriber.onSubscribe(new Flow.Subscription() {
            @Override
            public void request(long count) {}

            @Override
            public void cancel() {}
        });
        subscriber.onError(new IllegalStateException(
                "the publisher has a subscriber, and each message goes to one: subscribe to a SubmissionPublisher that"
                        + " is fed by it"));
    }

    private final class Subscription implements Flow.Subscription, Runnable {
        private Flow.@Nullable Subscriber<? super byte[]> subscriber;
        // Guarded by this.
        private long requested;
        private boolean isEnded, isCancelled;
        private @Nullable Throwable failure;
        /** The publisher's thread, while it waits for a message. */
        private @Nullable Thread waiting;

        Subscription(Flow.Subscriber<? super byte[]> subscriber) {
            this.subscriber = subscriber;
        }

        @Override
        public synchronized void request(long count) {
            if (count <= 0) {
                end(new IllegalArgumentException("request(" + count + "): wanted 1 or more (Reactive Streams, rule 3.9)"));
                return;
            }
            requested = requested + count < 0 ? Long.MAX_VALUE : requested + count;
            notifyAll();
        }

        @Override
        public synchronized void cancel() {
            isCancelled = true;
            end(null);
        }

        /** Ends the publication; the thread signals the failure, unless the subscription is cancelled. */
        private synchronized void end(@Nullable Throwable failure) {
            if (!isEnded) this.failure = failure;
            isEnded = true;
            notifyAll();
            if (waiting != null) waiting.interrupt();
        }

        @Override
        public void run() {
            Flow.Subscriber<? super byte[]> subscriber = Objects.requireNonNull(this.subscriber);
            try {
                subscriber.onSubscribe(this);
                for (byte[] message; (message = next()) != null; ) subscriber.onNext(message);
            } catch (Throwable thrown) {
                // Rule 2.13: such a subscription counts as cancelled.
                log(thrown);
                cancel();
            }
            try {
                closeSource.run();
            } catch (RuntimeException thrown) {
                end(thrown);
            }
            try {
                signalEnd(subscriber);
            } catch (Throwable thrown) {
                log(thrown);
            }
            // Rule 3.13: the subscription can outlive it.
            this.subscriber = null;
        }

        /** Returns the next message, once it is requested, or null at the end. */
        private byte @Nullable [] next() {
            try {
                if (!hasNext()) return null;
                synchronized (this) {
                    while (requested == 0 && !isEnded) wait();
                    if (isEnded) return null;
                    if (requested < Long.MAX_VALUE) requested--;
                }
                return messages.next();
            } catch (InterruptedException impossible) {
                throw new AssertionError("an interrupt came while no message was awaited", impossible);
            } catch (RuntimeException thrown) {
                end(thrown);
                return null;
            }
        }

        private boolean hasNext() {
            synchronized (this) {
                if (isEnded) return false;
                waiting = Thread.currentThread();
                // The subscriber's.
                Thread.interrupted();
            }
            try {
                return messages.hasNext();
            } finally {
                synchronized (this) {
                    waiting = null;
                    Thread.interrupted();
                }
            }
        }

        private void signalEnd(Flow.Subscriber<? super byte[]> subscriber) {
            Throwable failure;
            synchronized (this) {
                if (isCancelled) return;
                isEnded = true;
                failure = this.failure;
            }
            if (failure == null) subscriber.onComplete();
            else subscriber.onError(failure);
        }

        private void log(Throwable thrown) {
            System.getLogger("pelton").log(Level.ERROR, "a subscriber failed: its subscription is cancelled", thrown);
        }
    }
}
