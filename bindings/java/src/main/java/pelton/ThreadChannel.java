package pelton;

import static java.lang.foreign.ValueLayout.JAVA_LONG;

import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;

/**
 * Both endpoints of a channel between threads of this process.
 *
 * @param sender for one thread at a time
 * @param receiver for one thread at a time
 */
public record ThreadChannel(Sender sender, Receiver receiver) implements AutoCloseable {
    /** Creates a channel. Does not wait. Of the options it uses those of a lane. */
    public static ThreadChannel create(Options options) {
        try (Arena arena = Arena.ofConfined()) {
            MemorySegment sender = arena.allocate(8, 8), receiver = arena.allocate(8, 8);
            PeltonException.check((int) Native.THREADS.invokeExact(options.channel(arena), sender, receiver));
            return new ThreadChannel(new Sender(sender.get(JAVA_LONG, 0)), new Receiver(receiver.get(JAVA_LONG, 0)));
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        }
    }

    /** As {@link #create(Options)} with {@link Options#DEFAULTS}. */
    public static ThreadChannel create() {
        return create(Options.DEFAULTS);
    }

    /** Closes both endpoints. Throws {@link WrongThreadException} while another thread is in a call with one. */
    @Override
    public void close() {
        try {
            sender.close();
        } finally {
            receiver.close();
        }
    }
}
