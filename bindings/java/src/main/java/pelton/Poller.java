package pelton;

import static java.lang.foreign.ValueLayout.JAVA_INT;
import static java.lang.foreign.ValueLayout.JAVA_LONG_UNALIGNED;

import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.locks.LockSupport;
import org.jspecify.annotations.Nullable;

/**
 * One thread that waits by epoll for the descriptors of all handles on which virtual threads wait, and unparks those.
 *
 * <p>Each interest is one-shot: it is set for one wait, and an event clears it. An event that arrives after its wait
 * has ended finds no thread, or causes a spurious return of {@link Interest#await}, which callers expect.
 */
final class Poller {
    private static final int EPOLL_CLOEXEC = 0x80000;
    private static final int ADD = 1, DELETE = 2, MODIFY = 3;
    private static final int EPOLLIN_ONESHOT = 1 | 1 << 30;
    private static final int EVENTS = 256;
    /** struct epoll_event is packed on x86-64 only. */
    private static final boolean PACKED = System.getProperty("os.arch").equals("amd64");
    private static final int EVENT_BYTES = PACKED ? 12 : 16, DATA = PACKED ? 4 : 8;

    private static final int EPOLL;
    private static final ConcurrentHashMap<Long, Interest> INTERESTS = new ConcurrentHashMap<>();
    private static final AtomicLong NEXT = new AtomicLong();

    static {
        try {
            EPOLL = (int) Native.EPOLL_CREATE.invokeExact(EPOLL_CLOEXEC);
        } catch (Throwable failure) {
            throw Native.unexpected(failure);
        }
        if (EPOLL < 0) throw new IllegalStateException("epoll_create1 failed: raise the limit of open files (ulimit -n)");
        Thread.ofPlatform().daemon().name("pelton-poller").start(Poller::run);
    }

    private Poller() {}

    private static void run() {
        MemorySegment events = Arena.global().allocate((long) EVENTS * EVENT_BYTES, 8);
        while (true) {
            int count;
            try {
                count = (int) Native.EPOLL_WAIT.invokeExact(EPOLL, events, EVENTS, -1);
            } catch (Throwable failure) {
                throw Native.unexpected(failure);
            }
            // -1 is EINTR: the descriptor and the memory are this class's own.
            for (int i = 0; i < count; i++) {
                Interest interest = INTERESTS.get(events.get(JAVA_LONG_UNALIGNED, (long) i * EVENT_BYTES + DATA));
                if (interest != null) interest.wake();
            }
        }
    }

    /** An interest in a descriptor, to be closed before the descriptor is. */
    static Interest interest(int descriptor) {
        return new Interest(descriptor);
    }

    static final class Interest implements AutoCloseable {
        private final int descriptor;
        private final long id = NEXT.getAndIncrement();
        // Freed by the collector: to close a shared arena stops every thread for a moment.
        private final MemorySegment event = Arena.ofAuto().allocate(16, 8);
        private volatile @Nullable Thread waiting;
        private volatile boolean isReady;
        private boolean isAdded;

        private Interest(int descriptor) {
            this.descriptor = descriptor;
            INTERESTS.put(id, this);
        }

        /** Ends the wait that has begun, of whichever thread. Any thread. */
        void wake() {
            isReady = true;
            LockSupport.unpark(waiting);
        }

        /**
         * Parks the calling thread until the descriptor is readable, or the deadline. Returns whether it may be
         * readable.
         */
        boolean await(long deadlineNs) throws InterruptedException {
            begin();
            return parkUntil(deadlineNs);
        }

        /** Begins a wait of the calling thread: events and {@link #wake} from now on end its {@link #parkUntil}. */
        void begin() {
            isReady = false;
            waiting = Thread.currentThread();
            control(isAdded ? MODIFY : ADD);
            isAdded = true;
        }

        /** The rest of {@link #await}, after {@link #begin}. */
        boolean parkUntil(long deadlineNs) throws InterruptedException {
            try {
                while (!isReady) {
                    if (Thread.interrupted()) throw new InterruptedException();
                    if (deadlineNs == Native.FOREVER) {
                        LockSupport.park(this);
                    } else {
                        long leftNs = deadlineNs - Native.deadline(0L);
                        if (leftNs <= 0) return false;
                        LockSupport.parkNanos(this, leftNs);
                    }
                }
                return true;
            } finally {
                waiting = null;
            }
        }

        private void control(int operation) {
            event.set(JAVA_INT, 0, EPOLLIN_ONESHOT);
            event.set(JAVA_LONG_UNALIGNED, DATA, id);
            int result;
            try {
                result = (int) Native.EPOLL_CTL.invokeExact(EPOLL, operation, descriptor, event);
            } catch (Throwable failure) {
                throw Native.unexpected(failure);
            }
            if (result != 0 && operation != DELETE)
                throw new IllegalStateException("epoll_ctl refused descriptor " + descriptor
                        + ": raise /proc/sys/fs/epoll/max_user_watches, or wait on fewer handles");
        }

        @Override
        public void close() {
            if (INTERESTS.remove(id) == null) return;
            if (isAdded) control(DELETE);
        }
    }
}
