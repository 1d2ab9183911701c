package pelton;

import java.util.concurrent.Flow;
import org.reactivestreams.tck.flow.FlowSubscriberBlackboxVerification;

/** Reactive Streams: the subscriber that sends. */
public class SenderSubscriberTest extends FlowSubscriberBlackboxVerification<byte[]> {
    public SenderSubscriberTest() {
        super(Streams.environment());
    }

    @Override
    public Flow.Subscriber<byte[]> createFlowSubscriber() {
        Streams.Pair pair = Streams.pair();
        Thread.startVirtualThread(() -> {
            try (Receiver receiver = pair.receiver()) {
                while (receiver.iterator().hasNext()) receiver.tryReceive();
            }
        });
        return pair.sender().subscriber();
    }

    @Override
    public byte[] createElement(int element) {
        return new byte[] {(byte) element};
    }
}
