package pelton;

import static java.lang.foreign.ValueLayout.ADDRESS;
import static java.lang.foreign.ValueLayout.JAVA_BYTE;
import static java.lang.foreign.ValueLayout.JAVA_INT;
import static java.lang.foreign.ValueLayout.JAVA_LONG;

import java.io.ByteArrayOutputStream;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.HashMap;
import java.util.LinkedHashSet;
import java.util.concurrent.CancellationException;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.locks.LockSupport;
import java.util.function.BooleanSupplier;
import org.jspecify.annotations.Nullable;

/**
 * Calls a service. Any number of threads share a client: their calls are in flight at the same time, up to 1,024; a
 * further one waits for its turn. A wait parks a virtual thread.
 *
 * <p>With "unix:PATH", the end of the service ends the client: calls in flight, and all later ones, throw {@link
 * PeltonException.PeerDied} or {@link PeltonException.Closed}. With a short name, calls are spread over all processes
 * that listen under it, and the client continues with the others when one ends.
 */
public final class Client extends LockedHandle {
    private static final int REPLY = 1, PART = 2, END = 3, FAILED = 4, ABANDONED = 5, LOST = 6;
    private static final int IDEMPOTENT = 1;
    private static final int BUFFER_BYTES = 64 << 10;

    /** Of a request with a traceparent, the additional bytes in the lane: spec/call.md. */
    private static final int TRACED_BYTES = 32;
    /** pelton_client_info, and its fields. */
    private static final int INFO_BYTES = 56, INFO_SERVICES = 24, INFO_IN_FLIGHT = 32, INFO_DROPPED = 40;

    private final boolean isSpinning;
    private final boolean hasOneService;
    private final long callBytesMax;

    // The lock guards everything below. No thread waits for a message with it.
    private final MemorySegment buffer = Arena.ofAuto().allocate(BUFFER_BYTES, 8);
    private final MemorySegment completion = Arena.ofAuto().allocate(32, 8);
    private final MemorySegment out = Arena.ofAuto().allocate(8, 8);
    private long droppedSeen;
    private final HashMap<Long, Call> calls = new HashMap<>();
    private final LinkedHashSet<Waiter> waiters = new LinkedHashSet<>();
    private final ArrayDeque<SpaceWaiter> spaceWaiters = new ArrayDeque<>();
    /** The one of the waiters that takes completions, for all. */
    private @Nullable Waiter leader;
    /** The leader's wait for the armed descriptor. */
    private Poller.@Nullable Interest armed;

    private record Waiter(Thread thread) {
        // Each wait is one of its own, also of the same thread.
        @Override
        public boolean equals(@Nullable Object other) {
            return this == other;
        }

        @Override
        public int hashCode() {
            return System.identityHashCode(this);
        }
    }

    /** A request that found no space. */
    private static final class SpaceWaiter {
        final Thread thread = Thread.currentThread();
        boolean mayRetry, isGone;
    }

    private Client(long address, String name, Options options) {
        super(address);
        isSpinning = options.spin();
        hasOneService = name.startsWith("unix:");
        callBytesMax = options.callBytesMax() == 0 ? 64L << 20 : options.callBytesMax();
    }

    /**
     * Connects to the service that listens under a short name ("events") or a socket's path ("unix:PATH"). Waits for it
     * up to the timeout of the options. Throws {@link PeltonException.NoListener}, {@link PeltonException.TimedOut},
     * and other {@link PeltonException}s.
     */
    public static Client connect(String name, Options options) throws InterruptedException {
        long address = openInSteps(
                Native.CLIENT_OPEN_START, Native.CLIENT_OPENING_FD, Native.CLIENT_OPENING_FINISH, name, options::client);
        return new Client(address, name, options);
    }

    /** As {@link #connect(String, Options)} with {@link Options#DEFAULTS}. */
    public static Client connect(String name) throws InterruptedException {
        return connect(name, Options.DEFAULTS);
    }

    /**
     * Calls the service, and waits for the whole reply; parts are joined. An interrupt cancels the call. Throws {@link
     * PeltonException.Failed}: the service failed the call. {@link PeltonException.TimedOut}: the call is cancelled, or
     * was not submitted. {@link PeltonException.Abandoned}, {@link PeltonException.PeerDied}, {@link
     * PeltonException.Closed}: it is unknown whether it was carried out. {@link PeltonException.NoListener}: it was
     * not. {@link PeltonException.TooLarge}: the service does not accept such a request.
     */
    public byte[] call(byte[] request, CallOptions options) throws InterruptedException {
        try (Call call = stream(request, options)) {
            byte[] first = call.next();
            if (first == null) return new byte[0];
            byte[] part = call.next();
            if (part == null) return first;
            ByteArrayOutputStream all = new ByteArrayOutputStream();
            all.writeBytes(first);
            for (; part != null; part = call.next()) {
                if (all.size() + (long) part.length > callBytesMax) throw tooManyParts();
                all.writeBytes(part);
            }
            return all.toByteArray();
        }
    }

    /** As {@link #call(byte[], CallOptions)} with {@link CallOptions#DEFAULTS}. */
    public byte[] call(byte[] request) throws InterruptedException {
        return call(request, CallOptions.DEFAULTS);
    }

    /** As {@link #call(byte[], CallOptions)}, with a limit of time. */
    public byte[] call(byte[] request, Duration timeout) throws InterruptedException {
        return call(request, CallOptions.DEFAULTS.withTimeout(timeout));
    }

    /**
     * Calls on a virtual thread of its own, and does not wait. What {@link #call(byte[], CallOptions)} throws completes
     * the future exceptionally. {@link CompletableFuture#cancel} cancels the call. The request must not change before
     * the future has completed.
     */
    public CompletableFuture<byte[]> callAsync(byte[] request, CallOptions options) {
        Thread[] caller = new Thread[1];
        CompletableFuture<byte[]> reply = new CompletableFuture<>() {
            @Override
            public boolean cancel(boolean mayInterruptIfRunning) {
                boolean isCancelled = super.cancel(mayInterruptIfRunning);
                if (isCancelled) caller[0].interrupt();
                return isCancelled;
            }
        };
        caller[0] = Thread.ofVirtual().unstarted(() -> {
            try {
                reply.complete(call(request, options));
            } catch (Throwable failure) {
                reply.completeExceptionally(failure);
            }
        });
        caller[0].start();
        return reply;
    }

    /** As {@link #callAsync(byte[], CallOptions)} with {@link CallOptions#DEFAULTS}. */
    public CompletableFuture<byte[]> callAsync(byte[] request) {
        return callAsync(request, CallOptions.DEFAULTS);
    }

    /**
     * Submits a request whose reply comes in parts, which the call returns one by one. Waits for space, not for the
     * reply. Throws as {@link #call(byte[], CallOptions)}.
     */
    public Call stream(byte[] request, CallOptions options) throws InterruptedException {
        long deadlineNs = options.deadlineNs();
        lock.lock();
        try {
            Call call = new Call(this, deadlineNs);
            if (!inSpace(deadlineNs, () -> trySubmit(call, request, options, deadlineNs))) throw timedOut();
            return call;
        } finally {
            unlock();
        }
    }

    /** As {@link #stream(byte[], CallOptions)} with {@link CallOptions#DEFAULTS}. */
    public Call stream(byte[] request) throws InterruptedException {
        return stream(request, CallOptions.DEFAULTS);
    }

    /** Sends a message to which the service does not reply. Waits for space. Throws as the call of a request. */
    public void notify(byte[] message) throws InterruptedException {
        lock.lock();
        try {
            inSpace(Native.FOREVER, () -> {
                try (Arena arena = Arena.ofConfined()) {
                    return (int) Native.CLIENT_NOTIFY.invokeExact(
                            address(), copied(message, arena), (long) message.length, Native.NO_WAIT);
                } catch (Throwable failure) {
                    throw Native.unexpected(failure);
                }
            });
        } finally {
            unlock();
        }
    }

    /** Closes the client. Calls in flight are cancelled, and throw {@link PeltonException.Closed}. Any thread. */
    @Override
    public void close() {
        lock.lock();
        try {
            super.close();
            failAll(PeltonException.CLOSED, "the Client was closed during the call");
            if (armed != null) armed.wake();
        } finally {
            unlock();
        }
    }

    static PeltonException timedOut() {
        return new PeltonException.TimedOut("the call has reached its deadline, and is cancelled: wait longer, or see"
                + " what its service does");
    }

    private PeltonException tooManyParts() {
        return PeltonException.of(
                PeltonException.REFUSED,
                "more than " + callBytesMax + " bytes of the reply's parts wait, and the call is cancelled: take them"
                        + " sooner by stream(), or raise callBytesMax");
    }

    private MemorySegment copied(byte[] bytes, Arena arena) {
        MemorySegment to = bytes.length <= BUFFER_BYTES ? buffer : arena.allocate(bytes.length, 8);
        MemorySegment.copy(bytes, 0, to, JAVA_BYTE, 0, bytes.length);
        return to;
    }

    @FunctionalInterface
    private interface Submission {
        int attempt();
    }

    private int trySubmit(Call call, byte[] request, CallOptions options, long deadlineNs) {
        int flags = options.idempotent() ? IDEMPOTENT : 0;
        long address = address(), size = request.length, untilNs = Native.NO_WAIT;
        try (Arena arena = Arena.ofConfined()) {
            if (deadlineNs != Native.FOREVER) {
                // With a deadline the library would wait until then: so only where there is space.
                long wanted = options.traceparent() == null ? size : size + TRACED_BYTES;
                int result = (int) Native.CLIENT_RESERVE.invokeExact(address, wanted, Native.NO_WAIT, out);
                if (result == PeltonException.OK) {
                    untilNs = deadlineNs;
                    PeltonException.check((int) Native.CLIENT_ABORT.invokeExact(address));
                } else if (result != PeltonException.TOO_LARGE) {
                    return result;
                }
            }
            MemorySegment bytes = copied(request, arena);
            String span = options.traceparent();
            int result = span == null
                    ? (int) Native.CLIENT_SUBMIT.invokeExact(address, bytes, size, flags, untilNs, out)
                    : (int) Native.CLIENT_SUBMIT_TRACED.invokeExact(
                            address, bytes, size, arena.allocateFrom(span), flags, untilNs, out);
            if (result == PeltonException.OK) {
                call.number = out.get(JAVA_LONG, 0);
                calls.put(call.number, call);
            }
            return result;
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        }
    }

    /** Repeats what finds no space, until the deadline. Returns false then. */
    private boolean inSpace(long deadlineNs, Submission submission) throws InterruptedException {
        for (boolean hasWaited = false; ; hasWaited = true) {
            int result = submission.attempt();
            armAgain();
            if (result != PeltonException.AGAIN) {
                // There can be space for the next one, too. It also learns of an error.
                wakeForSpace(1);
                PeltonException.check(result);
                return true;
            }
            SpaceWaiter waiter = new SpaceWaiter();
            // In front of those that came later.
            if (hasWaited) spaceWaiters.addFirst(waiter);
            else spaceWaiters.addLast(waiter);
            boolean mayRetry = false;
            try {
                mayRetry = await(() -> waiter.mayRetry, deadlineNs);
            } finally {
                waiter.isGone = true;
                if (!mayRetry && waiter.mayRetry) wakeForSpace(1);
            }
            if (!mayRetry) return false;
        }
    }

    private void wakeForSpace(int count) {
        while (count > 0 && !spaceWaiters.isEmpty()) {
            SpaceWaiter waiter = spaceWaiters.removeFirst();
            if (waiter.isGone) continue;
            waiter.mayRetry = true;
            wake(waiter.thread);
            count--;
        }
    }

    /** Ends the sleep of a thread that waits, which then evaluates its condition. */
    private void wake(@Nullable Thread thread) {
        if (armed != null && leader != null && leader.thread == thread) armed.wake();
        else LockSupport.unpark(thread);
    }

    /** After each submission and cancellation: what the leader waits for has changed. */
    private void armAgain() {
        if (armed == null) return;
        try {
            if ((int) Native.CLIENT_ARM.invokeExact(address()) != PeltonException.OK) armed.wake();
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        }
    }

    /** Cancels a call that is not complete. */
    void cancel(Call call) {
        lock.lock();
        try {
            // An exception costs as much as a call.
            if (calls.containsKey(call.number))
                cancel(call, new CancellationException("the call was closed, which has cancelled it"));
        } finally {
            unlock();
        }
    }

    private void cancel(Call call, RuntimeException failure) {
        if (calls.remove(call.number) == null) return;
        try {
            // A failure is the client's end, which the next call reports.
            int ignored = (int) Native.CLIENT_CANCEL.invokeExact(address(), call.number);
        } catch (Throwable thrown) {
            throw Native.unexpected(thrown);
        }
        call.fail(failure);
        wake(call.waiting);
        armAgain();
    }

    /** Waits for the next part of a call; null is the end. */
    byte @Nullable [] next(Call call) throws InterruptedException {
        lock.lock();
        try {
            call.waiting = Thread.currentThread();
            try {
                if (!await(() -> call.isComplete || !call.parts.isEmpty(), call.deadlineNs)) cancel(call, timedOut());
            } catch (InterruptedException interrupted) {
                cancel(call, new CancellationException("the call was interrupted, which has cancelled it"));
                throw interrupted;
            } finally {
                call.waiting = null;
            }
            return call.take();
        } finally {
            unlock();
        }
    }

    /**
     * Waits, until the condition or the deadline; returns false then. One of those that wait takes completions for all
     * of them, and passes that on when it leaves.
     */
    private boolean await(BooleanSupplier condition, long deadlineNs) throws InterruptedException {
        if (condition.getAsBoolean()) return true;
        Waiter me = new Waiter(Thread.currentThread());
        waiters.add(me);
        try {
            while (!condition.getAsBoolean()) {
                if (Thread.interrupted()) throw new InterruptedException();
                if (Native.isPast(deadlineNs)) return false;
                if (leader == null) leader = me;
                if (leader == me) lead(deadlineNs);
                else park(deadlineNs);
            }
            return true;
        } finally {
            waiters.remove(me);
            if (leader == me) leader = null;
            // One that was to lead can have left instead: then it is for the next one.
            if (leader == null && !waiters.isEmpty()) LockSupport.unpark(waiters.getFirst().thread);
        }
    }

    private void park(long deadlineNs) {
        lock.unlock();
        try {
            if (deadlineNs == Native.FOREVER) LockSupport.park(this);
            else LockSupport.parkNanos(this, deadlineNs - Native.deadline(0L));
        } finally {
            lock.lock();
        }
    }

    /** Takes completions, or waits until there may be some. */
    private void lead(long deadlineNs) throws InterruptedException {
        long address = address();
        try {
            int result = takeCompletions(address);
            if (result == PeltonException.OK) return;
            if (isSpinning && result == PeltonException.AGAIN) {
                lock.unlock();
                Thread.onSpinWait();
                lock.lock();
                // Without arming, only another attempt learns of space.
                wakeForSpace(1);
                return;
            }
            // Others that want to submit would wait for the busy-poll.
            if (result == PeltonException.AGAIN && !lock.hasQueuedThreads())
                result = (int) Native.CLIENT_POLL.invokeExact(address);
            if (result == PeltonException.OK) return;
            if (result == PeltonException.AGAIN && hasDropped(address)) {
                wakeForSpace(1);
                return;
            }
            if (result == PeltonException.AGAIN || result == PeltonException.REFUSED)
                result = (int) Native.CLIENT_ARM.invokeExact(address);
            if (result == PeltonException.READY) {
                // It says that there is space once.
                wakeForSpace(1);
                return;
            }
            if (result < 0) {
                failAll(result, Native.errorText(result));
                return;
            }
            Poller.Interest interest = interest(Native.CLIENT_FD, address);
            interest.begin();
            armed = interest;
            boolean isReadable = false;
            lock.unlock();
            try {
                isReadable = interest.parkUntil(deadlineNs);
            } finally {
                lock.lock();
                armed = null;
                if (isOpen()) {
                    int ignored = (int) Native.CLIENT_DISARM.invokeExact(address);
                }
            }
            if (isReadable) wakeForSpace(1);
        } catch (InterruptedException interrupted) {
            throw interrupted;
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        }
    }

    /** Whether completions of cancelled calls have come, which free slots, while requests wait for these. */
    private boolean hasDropped(long address) {
        if (spaceWaiters.isEmpty()) return false;
        long before = droppedSeen;
        droppedSeen = figure(address, INFO_DROPPED);
        return droppedSeen != before;
    }

    /** Returns how many calls are in flight, with cancelled ones that the service has not finished. Any thread. */
    public int inFlight() {
        return (int) figure(INFO_IN_FLIGHT);
    }

    /** Returns how many processes the client calls at present. Any thread. */
    public int services() {
        return (int) figure(INFO_SERVICES);
    }

    private long figure(long at) {
        lock.lock();
        try {
            return figure(address(), at);
        } finally {
            unlock();
        }
    }

    private static long figure(long address, long at) {
        return info(Native.CLIENT_GET_INFO, address, INFO_BYTES, info -> info.get(JAVA_LONG, at));
    }

    /** Gives each completion that has come to its call. Returns OK if there was one, AGAIN, or an error. */
    private int takeCompletions(long address) throws Throwable {
        int count = 0, result;
        while ((result = (int) Native.CLIENT_AWAIT.invokeExact(address, Native.NO_WAIT, completion))
                == PeltonException.OK) {
            count++;
            int outcome = completion.get(JAVA_INT, 24);
            long number = completion.get(JAVA_LONG, 0);
            Call call = outcome == PART ? calls.get(number) : calls.remove(number);
            if (call != null) complete(call, outcome);
            PeltonException.check((int) Native.CLIENT_RELEASE.invokeExact(address));
            if (call != null && call.waitingBytes > callBytesMax) {
                call.parts.clear();
                // After its last part it is complete: there is nothing to cancel.
                if (outcome == PART) cancel(call, tooManyParts());
                else call.fail(tooManyParts());
            }
        }
        wakeForSpace(count);
        return count > 0 ? PeltonException.OK : result;
    }

    private void complete(Call call, int outcome) {
        int code = completion.get(JAVA_INT, 28);
        switch (outcome) {
            case REPLY, PART -> call.add(bytes(), outcome == REPLY);
            case END -> call.end();
            case FAILED -> call.fail(new PeltonException.Failed(code, bytes()));
            case ABANDONED -> call.fail(new PeltonException.Abandoned());
            case LOST -> {
                int reason = code != PeltonException.AGAIN
                        ? code
                        : hasOneService ? PeltonException.REFUSED : PeltonException.NO_LISTENER;
                call.fail(PeltonException.of(
                        reason,
                        "the call's service has ended" + (code == PeltonException.AGAIN
                                ? ", and had not begun it: call again"
                                : ", and it is unknown whether the call was carried out: "
                                        + Native.codeText(reason))));
            }
            default -> throw new AssertionError("libpelton returned outcome " + outcome);
        }
    }

    private byte[] bytes() {
        long size = completion.get(JAVA_LONG, 16);
        // The library keeps that many bytes there until the release.
        return completion.get(ADDRESS, 8).reinterpret(size).toArray(JAVA_BYTE);
    }

    private void failAll(int code, String text) {
        for (Call call : calls.values()) call.fail(PeltonException.of(code, text));
        calls.clear();
        wakeForSpace(Integer.MAX_VALUE);
    }
}
