package pelton;

import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.ValueLayout;
import java.lang.invoke.MethodHandle;
import java.time.Duration;
import org.jspecify.annotations.Nullable;

/** Listens under a name. Each accepted peer gets a channel of its own. */
public final class Listener extends Handle {
    /** The longest handshake with a peer that has connected. */
    private static final long HANDSHAKE_NS = 5_000_000_000L;

    private Listener(long address) {
        super(address);
    }

    /**
     * Listens under a short name ("events") or a socket's path ("unix:PATH"). Does not wait. Throws {@link
     * PeltonException} if another process listens there.
     */
    public static Listener listen(String name, Options options) {
        return new Listener(open(Native.LISTENER_OPEN, name, options::channel));
    }

    /** As {@link #listen(String, Options)} with {@link Options#DEFAULTS}. */
    public static Listener listen(String name) {
        return listen(name, Options.DEFAULTS);
    }

    /** Waits for a sender to connect, and returns the receiver of its channel. */
    public Receiver acceptReceiver() throws InterruptedException {
        return new Receiver(accept(Native.ACCEPT_RECEIVER, Native.FOREVER));
    }

    /** As {@link #acceptReceiver()}; returns null if no sender connects within {@code timeout}. */
    public @Nullable Receiver acceptReceiver(Duration timeout) throws InterruptedException {
        long address = accept(Native.ACCEPT_RECEIVER, Native.deadline(timeout));
        return address == 0 ? null : new Receiver(address);
    }

    /** Waits for a receiver to connect, and returns the sender of its channel. */
    public Sender acceptSender() throws InterruptedException {
        return new Sender(accept(Native.ACCEPT_SENDER, Native.FOREVER));
    }

    /** As {@link #acceptSender()}; returns null if no receiver connects within {@code timeout}. */
    public @Nullable Sender acceptSender(Duration timeout) throws InterruptedException {
        long address = accept(Native.ACCEPT_SENDER, Native.deadline(timeout));
        return address == 0 ? null : new Sender(address);
    }

    /** The accepted C handle, or 0 at the deadline. The handshake itself, some milliseconds, is in the library. */
    private long accept(MethodHandle function, long deadlineNs) throws InterruptedException {
        long address = enter();
        try (Arena arena = Arena.ofConfined()) {
            MemorySegment out = arena.allocate(8, 8);
            int descriptor = (int) Native.LISTENER_FD.invokeExact(address);
            PeltonException.check(descriptor);
            while (true) {
                boolean isReadable = Native.awaitReadable(descriptor, deadlineNs);
                long until = isReadable ? Native.deadline(HANDSHAKE_NS) : Native.NO_WAIT;
                int result = (int) function.invokeExact(address, until, out);
                if (result == PeltonException.OK) return out.get(ValueLayout.JAVA_LONG, 0);
                if (result != PeltonException.AGAIN) throw PeltonException.of(result);
                if (Native.isPast(deadlineNs)) return 0;
            }
        } catch (InterruptedException interrupted) {
            throw interrupted;
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        } finally {
            exit();
        }
    }
}
