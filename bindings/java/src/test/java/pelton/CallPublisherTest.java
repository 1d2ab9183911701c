package pelton;

import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.concurrent.Flow;
import org.reactivestreams.tck.flow.FlowPublisherVerification;
import org.testng.annotations.AfterClass;
import org.testng.annotations.BeforeClass;

/** Reactive Streams: the publisher of a reply in parts. */
public class CallPublisherTest extends FlowPublisherVerification<byte[]> {
    private Path directory;
    private Thread running;
    private Service service;
    private Client client;

    public CallPublisherTest() {
        super(Streams.environment());
    }

    @BeforeClass
    void serve() throws Exception {
        directory = Files.createTempDirectory("pelton");
        String name = "unix:" + directory.resolve("socket");
        service = Service.listen(name);
        running = Thread.ofVirtual().start(() -> {
            try {
                service.run(request -> {
                    long count = Long.parseLong(new String(request.bytes()));
                    for (long i = 0; i < count; i++) request.part(new byte[] {(byte) i});
                    return null;
                });
            } catch (InterruptedException impossible) {
                throw new AssertionError(impossible);
            }
        });
        // Parts that no test takes go beyond no limit: they are of one byte.
        client = Client.connect(name, Options.DEFAULTS.withTimeout(Duration.ofSeconds(30)));
    }

    @AfterClass
    void stop() throws Exception {
        client.close();
        service.stop();
        running.join();
        service.close();
        Files.delete(directory);
    }

    @Override
    public Flow.Publisher<byte[]> createFlowPublisher(long elements) {
        try {
            // An empty reply is one part of no bytes.
            return client.stream(Long.toString(elements).getBytes()).publisher();
        } catch (InterruptedException impossible) {
            throw new AssertionError(impossible);
        }
    }

    /** Any subscriber after the first. */
    @Override
    public Flow.Publisher<byte[]> createFailedFlowPublisher() {
        Flow.Publisher<byte[]> taken = createFlowPublisher(1);
        taken.subscribe(Streams.cancels());
        return taken;
    }

    @Override
    public long maxElementsFromPublisher() {
        return 1_000_000;
    }
}
