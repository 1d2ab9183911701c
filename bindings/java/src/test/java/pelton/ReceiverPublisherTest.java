package pelton;

import java.util.concurrent.Flow;
import org.reactivestreams.tck.flow.FlowPublisherVerification;

/** Reactive Streams: the publisher of a receiver. */
public class ReceiverPublisherTest extends FlowPublisherVerification<byte[]> {
    public ReceiverPublisherTest() {
        super(Streams.environment());
    }

    @Override
    public Flow.Publisher<byte[]> createFlowPublisher(long elements) {
        Streams.Pair pair = Streams.pair();
        Thread.startVirtualThread(() -> {
            try (Sender sender = pair.sender()) {
                for (long i = 0; i < elements; i++) sender.send(new byte[] {(byte) i});
            } catch (PeltonException.Closed cancelled) {
                // The test does not want more.
            } catch (InterruptedException impossible) {
                throw new AssertionError(impossible);
            }
        });
        return pair.receiver().publisher();
    }

    /** Any subscriber after the first. */
    @Override
    public Flow.Publisher<byte[]> createFailedFlowPublisher() {
        Flow.Publisher<byte[]> taken = createFlowPublisher(1);
        taken.subscribe(Streams.cancels());
        return taken;
    }
}
