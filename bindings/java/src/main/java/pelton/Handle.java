package pelton;

import java.lang.System.Logger.Level;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.ValueLayout;
import java.lang.invoke.MethodHandle;
import java.lang.invoke.MethodHandles;
import java.lang.invoke.VarHandle;
import java.lang.ref.Cleaner;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.function.Function;
import org.jspecify.annotations.Nullable;

/**
 * The common part of what pelton opens. One thread at a time uses a handle; another one may use it later. A call from a
 * second thread throws {@link WrongThreadException} and does nothing.
 *
 * <p>{@link #close} it, best by {@code try (...)}. A handle that becomes garbage is closed too, and the first such one
 * is logged as a warning.
 */
public abstract sealed class Handle implements AutoCloseable
        permits Appender, File, Files, HeldMessage, Listener, LockedHandle, Publisher, Receiver, RecordReader, Sender, Service,
                Subscriber {
    private static final Cleaner CLEANER = Cleaner.create();
    private static final AtomicBoolean HAS_WARNED = new AtomicBoolean();
    private static final VarHandle USER;

    static {
        try {
            USER = MethodHandles.lookup().findVarHandle(Handle.class, "user", Thread.class);
        } catch (ReflectiveOperationException failure) {
            throw new ExceptionInInitializerError(failure);
        }
    }

    private final Open open;
    private final Cleaner.Cleanable cleanable;
    /** The thread that is in a call. Its release also keeps the handle reachable until the call has ended. */
    @SuppressWarnings("unused")
    private @Nullable Thread user;

    Handle(long address) {
        open = new Open(address, getClass().getSimpleName());
        cleanable = CLEANER.register(this, open);
    }

    /** What closing needs. It must not refer to the handle. */
    private static final class Open implements Runnable {
        long address;
        final String kind;
        Poller.@Nullable Interest interest;
        int result;
        boolean isForgotten = true;

        Open(long address, String kind) {
            this.address = address;
            this.kind = kind;
        }

        @Override
        public void run() {
            if (address == 0) return;
            if (isForgotten && HAS_WARNED.compareAndSet(false, true))
                System.getLogger("pelton")
                        .log(Level.WARNING, "a " + kind + " became garbage and is closed now: use try (...), or close()."
                                + " Later ones are closed without a warning");
            if (interest != null) interest.close();
            try {
                result = (int) Native.CLOSE.invokeExact(address);
            } catch (Throwable failure) {
                throw Native.unexpected(failure);
            }
            address = 0;
        }
    }

    /** Begins a call: returns the C handle. {@link #exit} must follow. */
    final long enter() {
        Thread me = Thread.currentThread();
        Thread other = (Thread) USER.compareAndExchangeAcquire(this, (Thread) null, me);
        if (other != null) throw inUse(other, me);
        if (open.address == 0) {
            exit();
            throw closed();
        }
        return open.address;
    }

    /** The C handle, for a class that orders its threads itself. */
    final long address() {
        if (open.address == 0) throw closed();
        return open.address;
    }

    final boolean isOpen() {
        return open.address != 0;
    }

    private IllegalStateException closed() {
        return new IllegalStateException("the " + open.kind + " is closed: open another one");
    }

    private WrongThreadException inUse(Thread other, Thread me) {
        return new WrongThreadException(
                other == me
                        ? "the " + open.kind + " is in a call of this thread: use it after the handler has returned"
                        : "the " + open.kind + " is in a call of " + other + ": one thread at a time uses it, so open"
                                + " one for each thread, or order their calls");
    }

    final void exit() {
        USER.setRelease(this, (Thread) null);
    }

    /** Whether this thread is in a call with the handle. */
    final boolean isMine() {
        return USER.getAcquire(this) == Thread.currentThread();
    }

    /** Calls a function (handle) that does not wait. Returns its result, which is no error. */
    final int invoke(MethodHandle function) {
        long address = enter();
        try {
            int result = (int) function.invokeExact(address);
            PeltonException.check(result);
            return result;
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        } finally {
            exit();
        }
    }

    /** Calls a function (handle, out) that writes a C structure. Returns what {@code of} makes of it. */
    final <T> T info(MethodHandle function, int bytes, Function<MemorySegment, T> of) {
        long address = enter();
        try {
            return info(function, address, bytes, of);
        } finally {
            exit();
        }
    }

    /** As {@link #info(MethodHandle, int, Function)}, of a class that orders its threads itself. */
    static <T> T info(MethodHandle function, long address, int bytes, Function<MemorySegment, T> of) {
        try (Arena arena = Arena.ofConfined()) {
            MemorySegment info = arena.allocate(bytes, 8);
            info.set(ValueLayout.JAVA_INT, 0, bytes);
            PeltonException.check((int) function.invokeExact(address, info));
            return of.apply(info);
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        }
    }

    /** Parks the calling virtual thread until the handle's armed descriptor is readable, or the deadline. */
    final void park(MethodHandle descriptorOf, long address, long deadlineNs) throws InterruptedException {
        interest(descriptorOf, address).await(deadlineNs);
    }

    /** The interest in the handle's descriptor, which ends with the handle. */
    final Poller.Interest interest(MethodHandle descriptorOf, long address) {
        if (open.interest == null) {
            try {
                open.interest = Poller.interest((int) descriptorOf.invokeExact(address));
            } catch (Throwable failure) {
                throw Native.unexpected(failure);
            }
        }
        return open.interest;
    }

    /** Calls a function (handle, deadline) that waits, in slices, so that an interrupt ends the wait. */
    final int inSlices(MethodHandle function, long address, long deadlineNs) throws InterruptedException {
        while (true) {
            if (Thread.interrupted()) throw new InterruptedException();
            int result;
            try {
                result = (int) function.invokeExact(address, Native.slice(deadlineNs));
            } catch (Throwable failure) {
                throw Native.unexpected(failure);
            }
            if (result != PeltonException.AGAIN || Native.isPast(deadlineNs)) return result;
        }
    }

    /** Opens an endpoint without a wait in the library: returns the C handle. */
    static long openInSteps(
            MethodHandle start,
            MethodHandle descriptorOf,
            MethodHandle finish,
            String name,
            Function<Arena, MemorySegment> options)
            throws InterruptedException {
        try (Arena arena = Arena.ofConfined()) {
            MemorySegment out = arena.allocate(8, 8);
            PeltonException.check((int) start.invokeExact(Native.text(name, arena), options.apply(arena), out));
            long opening = out.get(ValueLayout.JAVA_LONG, 0);
            try {
                int descriptor = (int) descriptorOf.invokeExact(opening);
                PeltonException.check(descriptor);
                while (true) {
                    int result = (int) finish.invokeExact(opening, out);
                    if (result == PeltonException.OK) return out.get(ValueLayout.JAVA_LONG, 0);
                    if (result != PeltonException.AGAIN) throw PeltonException.of(result);
                    // It is readable at the deadline, too.
                    Native.awaitReadable(descriptor, Native.FOREVER);
                }
            } finally {
                int ignored = (int) Native.CLOSE.invokeExact(opening);
            }
        } catch (InterruptedException interrupted) {
            throw interrupted;
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        }
    }

    /** Opens by a function (name, options, out) that does not wait: returns the C handle. The name may be null. */
    static long open(MethodHandle function, @Nullable String name, Function<Arena, MemorySegment> options) {
        try (Arena arena = Arena.ofConfined()) {
            MemorySegment out = arena.allocate(8, 8);
            MemorySegment named = name == null ? MemorySegment.NULL : Native.text(name, arena);
            PeltonException.check((int) function.invokeExact(named, options.apply(arena), out));
            return out.get(ValueLayout.JAVA_LONG, 0);
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        }
    }

    /**
     * Closes the handle. Does not wait. Closing it again does nothing. Throws {@link WrongThreadException} while a
     * thread is in a call with it; then it remains open.
     */
    @Override
    public void close() {
        Thread me = Thread.currentThread();
        Thread other = (Thread) USER.compareAndExchangeAcquire(this, (Thread) null, me);
        if (other != null) throw inUse(other, me);
        try {
            if (open.address == 0) return;
            open.isForgotten = false;
            cleanable.clean();
            PeltonException.check(open.result);
        } finally {
            exit();
        }
    }
}
