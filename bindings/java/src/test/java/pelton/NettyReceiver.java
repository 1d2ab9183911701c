package pelton;

import io.netty.channel.IoEvent;
import io.netty.channel.IoEventLoop;
import io.netty.channel.IoRegistration;
import io.netty.channel.epoll.EpollIoHandle;
import io.netty.channel.epoll.EpollIoOps;
import io.netty.channel.unix.FileDescriptor;
import java.time.Duration;
import java.util.concurrent.CompletableFuture;

/**
 * An example: a receiver on an event loop of Netty, by its descriptor. The handler gets each message on the loop's
 * thread, which never waits for one.
 */
final class NettyReceiver implements EpollIoHandle {
    /** After so many messages the loop's other channels have their turn. */
    private static final int TURN = 256;

    private final Receiver receiver;
    private final Receiver.Handler handler;
    private final IoEventLoop loop;
    private final FileDescriptor descriptor;
    private final CompletableFuture<Void> ended = new CompletableFuture<>();

    private NettyReceiver(Receiver receiver, Receiver.Handler handler, IoEventLoop loop) {
        this.receiver = receiver;
        this.handler = handler;
        this.loop = loop;
        descriptor = new FileDescriptor(receiver.fd());
    }

    /** Returns a future that completes when the sender has closed, and fails as {@link Receiver#receive()} does. */
    static CompletableFuture<Void> run(Receiver receiver, Receiver.Handler handler, IoEventLoop loop) {
        NettyReceiver handle = new NettyReceiver(receiver, handler, loop);
        loop.register(handle).addListener(registered -> {
            IoRegistration registration = (IoRegistration) registered.getNow();
            if (registration == null) {
                handle.ended.completeExceptionally(registered.cause());
                return;
            }
            registration.submit(EpollIoOps.EPOLLIN);
            handle.receive(registration);
        });
        return handle.ended;
    }

    @Override
    public FileDescriptor fd() {
        return descriptor;
    }

    /** The descriptor is readable. */
    @Override
    public void handle(IoRegistration registration, IoEvent event) {
        receiver.disarm();
        receive(registration);
    }

    private void receive(IoRegistration registration) {
        try {
            for (int count = 0; count < TURN; count++)
                if (!receiver.receive(handler, Duration.ZERO) && receiver.arm()) return;
            loop.execute(() -> receive(registration));
        } catch (PeltonException.Closed closed) {
            end(registration, null);
        } catch (Throwable failure) {
            end(registration, failure);
        }
    }

    private void end(IoRegistration registration, Throwable failure) {
        registration.cancel();
        receiver.close();
        if (failure == null) ended.complete(null);
        else ended.completeExceptionally(failure);
    }

    /** The loop shuts down. The descriptor is the receiver's. */
    @Override
    public void close() {
        receiver.close();
    }
}
