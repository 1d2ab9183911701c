package pelton;

import static java.lang.foreign.ValueLayout.ADDRESS;
import static java.lang.foreign.ValueLayout.JAVA_INT;
import static java.lang.foreign.ValueLayout.JAVA_LONG;
import static java.lang.foreign.ValueLayout.JAVA_SHORT;

import java.io.IOException;
import java.io.InputStream;
import java.lang.foreign.AddressLayout;
import java.lang.foreign.Arena;
import java.lang.foreign.FunctionDescriptor;
import java.lang.foreign.Linker;
import java.lang.foreign.MemoryLayout;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.SymbolLookup;
import java.lang.invoke.MethodHandle;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.function.Function;
import org.jspecify.annotations.Nullable;

/**
 * The functions of libpelton and of the kernel that the binding calls. A handle is passed as its address, a long.
 *
 * <p>A call with {@code critical} keeps the garbage collector from starting meanwhile, so only calls that cannot wait
 * are such: sending, receiving and releasing without a wait, or with {@link #SOON}.
 */
final class Native {
    static final long NO_WAIT = 0;
    /** A deadline that has passed: the C function looks by its fast path, which NO_WAIT does not take. */
    static final long SOON = 1;
    static final long FOREVER = Long.MAX_VALUE;
    /** The longest call that waits: an interrupt ends the wait after at most that. */
    static final long SLICE_NS = 50_000_000;

    private static final int TRACEPARENT_SIZE = 56;

    private static final Linker LINKER = Linker.nativeLinker();
    private static final AddressLayout TEXT =
            ADDRESS.withTargetLayout(MemoryLayout.sequenceLayout(1 << 16, java.lang.foreign.ValueLayout.JAVA_BYTE));
    private static final SymbolLookup LIBRARY = library();
    private static final Linker.Option CRITICAL = Linker.Option.critical(false);
    private static final Linker.Option CRITICAL_HEAP = Linker.Option.critical(true);

    static final MethodHandle CLOSE = function("pelton_close", JAVA_INT, JAVA_LONG);
    static final MethodHandle SENDER_OPEN_START = opening("pelton_sender_open_start");
    static final MethodHandle SENDER_OPENING_FD = function("pelton_sender_opening_fd", JAVA_INT, JAVA_LONG);
    static final MethodHandle SENDER_OPENING_FINISH = function("pelton_sender_opening_finish", JAVA_INT, JAVA_LONG, ADDRESS);
    static final MethodHandle RECEIVER_OPEN_START = opening("pelton_receiver_open_start");
    static final MethodHandle RECEIVER_OPENING_FD = function("pelton_receiver_opening_fd", JAVA_INT, JAVA_LONG);
    static final MethodHandle RECEIVER_OPENING_FINISH =
            function("pelton_receiver_opening_finish", JAVA_INT, JAVA_LONG, ADDRESS);
    static final MethodHandle RECEIVER_GATHER = opening("pelton_receiver_gather");
    static final MethodHandle THREADS = opening("pelton_threads");
    static final MethodHandle LISTENER_OPEN = opening("pelton_listener_open");
    static final MethodHandle LISTENER_FD = function("pelton_listener_fd", JAVA_INT, JAVA_LONG);
    static final MethodHandle ACCEPT_SENDER =
            function("pelton_listener_accept_sender", JAVA_INT, JAVA_LONG, JAVA_LONG, ADDRESS);
    static final MethodHandle ACCEPT_RECEIVER =
            function("pelton_listener_accept_receiver", JAVA_INT, JAVA_LONG, JAVA_LONG, ADDRESS);

    static final MethodHandle TRY_SEND =
            function("pelton_sender_send", CRITICAL_HEAP, JAVA_INT, JAVA_LONG, ADDRESS, JAVA_LONG, JAVA_LONG);
    static final MethodHandle TRY_SEND_TRACED = function(
            "pelton_sender_send_traced", JAVA_INT, JAVA_LONG, ADDRESS, JAVA_LONG, ADDRESS, JAVA_LONG);
    static final MethodHandle SENDER_SEND_BATCH =
            function("pelton_sender_send_batch", JAVA_INT, JAVA_LONG, ADDRESS, JAVA_LONG, JAVA_LONG);
    static final MethodHandle SENDER_RESERVE =
            function("pelton_sender_reserve", JAVA_INT, JAVA_LONG, JAVA_LONG, JAVA_LONG, ADDRESS);
    static final MethodHandle SENDER_COMMIT = function("pelton_sender_commit", JAVA_INT, JAVA_LONG, JAVA_LONG);
    static final MethodHandle SENDER_ABORT = function("pelton_sender_abort", JAVA_INT, JAVA_LONG);
    static final MethodHandle SENDER_WAIT_RELEASED =
            function("pelton_sender_wait_released", JAVA_INT, JAVA_LONG, JAVA_LONG);
    static final MethodHandle SENDER_RESUME = function("pelton_sender_resume", JAVA_INT, JAVA_LONG, JAVA_LONG);
    static final MethodHandle SENDER_FD = function("pelton_sender_fd", JAVA_INT, JAVA_LONG);
    static final MethodHandle SENDER_POLL = function("pelton_sender_poll", JAVA_INT, JAVA_LONG, JAVA_LONG);
    static final MethodHandle SENDER_ARM = function("pelton_sender_arm", JAVA_INT, JAVA_LONG, JAVA_LONG);
    static final MethodHandle SENDER_DISARM = function("pelton_sender_disarm", JAVA_INT, JAVA_LONG);

    static final MethodHandle SENDER_GET_INFO = function("pelton_sender_get_info", JAVA_INT, JAVA_LONG, ADDRESS);

    static final MethodHandle TRY_RECEIVE =
            function("pelton_receiver_receive", CRITICAL, JAVA_INT, JAVA_LONG, JAVA_LONG, ADDRESS);
    static final MethodHandle RECEIVE =
            function("pelton_receiver_receive", JAVA_INT, JAVA_LONG, JAVA_LONG, ADDRESS);
    static final MethodHandle TRY_RECEIVE_BATCH = function(
            "pelton_receiver_receive_batch", CRITICAL, JAVA_INT, JAVA_LONG, JAVA_LONG, ADDRESS, JAVA_LONG, ADDRESS);
    static final MethodHandle RECEIVE_BATCH = function(
            "pelton_receiver_receive_batch", JAVA_INT, JAVA_LONG, JAVA_LONG, ADDRESS, JAVA_LONG, ADDRESS);
    static final MethodHandle RELEASE = function("pelton_receiver_release", CRITICAL, JAVA_INT, JAVA_LONG);
    /** For a message with descriptors, whose closing can wait. */
    static final MethodHandle RELEASE_DESCRIPTORS = function("pelton_receiver_release", JAVA_INT, JAVA_LONG);
    static final MethodHandle RECEIVER_HOLD = function("pelton_receiver_hold", JAVA_INT, JAVA_LONG, ADDRESS);
    static final MethodHandle RECEIVER_RESUME = function("pelton_receiver_resume", JAVA_INT, JAVA_LONG, JAVA_LONG);
    static final MethodHandle RECEIVER_TRACEPARENT =
            function("pelton_receiver_traceparent", JAVA_INT, JAVA_LONG, ADDRESS);
    static final MethodHandle RECEIVER_GET_INFO = function("pelton_receiver_get_info", JAVA_INT, JAVA_LONG, ADDRESS);
    static final MethodHandle RECEIVER_FD = function("pelton_receiver_fd", JAVA_INT, JAVA_LONG);
    static final MethodHandle RECEIVER_POLL = function("pelton_receiver_poll", JAVA_INT, JAVA_LONG);
    static final MethodHandle RECEIVER_ARM = function("pelton_receiver_arm", JAVA_INT, JAVA_LONG);
    static final MethodHandle RECEIVER_DISARM = function("pelton_receiver_disarm", JAVA_INT, JAVA_LONG);

    static final MethodHandle SUBSCRIPTION_REMOVE =
            function("pelton_subscription_remove", JAVA_INT, ADDRESS, ADDRESS);
    static final MethodHandle PUBLISHER_OPEN = opening("pelton_publisher_open");
    static final MethodHandle PUBLISHER_SUBSCRIBER =
            function("pelton_publisher_subscriber", JAVA_INT, JAVA_LONG, ADDRESS, ADDRESS);
    static final MethodHandle PUBLISHER_SEND =
            function("pelton_publisher_send", JAVA_INT, JAVA_LONG, ADDRESS, JAVA_LONG, JAVA_LONG);
    static final MethodHandle PUBLISHER_WAIT_SUBSCRIBERS =
            function("pelton_publisher_wait_subscribers", JAVA_INT, JAVA_LONG, JAVA_LONG, JAVA_LONG);
    static final MethodHandle PUBLISHER_WAIT_RELEASED =
            function("pelton_publisher_wait_released", JAVA_INT, JAVA_LONG, JAVA_LONG);
    static final MethodHandle PUBLISHER_SUBSCRIBERS =
            function("pelton_publisher_subscribers", JAVA_INT, JAVA_LONG, ADDRESS, JAVA_LONG, ADDRESS);
    static final MethodHandle PUBLISHER_FD = function("pelton_publisher_fd", JAVA_INT, JAVA_LONG);
    static final MethodHandle PUBLISHER_ARM = function("pelton_publisher_arm", JAVA_INT, JAVA_LONG, JAVA_LONG);
    static final MethodHandle PUBLISHER_DISARM = function("pelton_publisher_disarm", JAVA_INT, JAVA_LONG);
    static final MethodHandle PUBLISHER_GET_INFO = function("pelton_publisher_get_info", JAVA_INT, JAVA_LONG, ADDRESS);
    static final MethodHandle SUBSCRIBER_OPEN_START = opening("pelton_subscriber_open_start");
    static final MethodHandle SUBSCRIBER_OPENING_FD =
            function("pelton_subscriber_opening_fd", JAVA_INT, JAVA_LONG);
    static final MethodHandle SUBSCRIBER_OPENING_FINISH =
            function("pelton_subscriber_opening_finish", JAVA_INT, JAVA_LONG, ADDRESS);
    static final MethodHandle SUBSCRIBER_RECEIVE =
            function("pelton_subscriber_receive", JAVA_INT, JAVA_LONG, JAVA_LONG, ADDRESS);
    static final MethodHandle SUBSCRIBER_RELEASE = function("pelton_subscriber_release", JAVA_INT, JAVA_LONG);
    static final MethodHandle SUBSCRIBER_RESUME =
            function("pelton_subscriber_resume", JAVA_INT, JAVA_LONG, JAVA_LONG);
    static final MethodHandle SUBSCRIBER_FD = function("pelton_subscriber_fd", JAVA_INT, JAVA_LONG);
    static final MethodHandle SUBSCRIBER_POLL = function("pelton_subscriber_poll", JAVA_INT, JAVA_LONG);
    static final MethodHandle SUBSCRIBER_ARM = function("pelton_subscriber_arm", JAVA_INT, JAVA_LONG);
    static final MethodHandle SUBSCRIBER_DISARM = function("pelton_subscriber_disarm", JAVA_INT, JAVA_LONG);
    static final MethodHandle SUBSCRIBER_GET_INFO =
            function("pelton_subscriber_get_info", JAVA_INT, JAVA_LONG, ADDRESS);

    static final MethodHandle CLIENT_OPEN_START = opening("pelton_client_open_start");
    static final MethodHandle CLIENT_OPENING_FD = function("pelton_client_opening_fd", JAVA_INT, JAVA_LONG);
    static final MethodHandle CLIENT_OPENING_FINISH =
            function("pelton_client_opening_finish", JAVA_INT, JAVA_LONG, ADDRESS);
    static final MethodHandle CLIENT_SUBMIT = function(
            "pelton_client_submit", JAVA_INT, JAVA_LONG, ADDRESS, JAVA_LONG, JAVA_INT, JAVA_LONG, ADDRESS);
    static final MethodHandle CLIENT_SUBMIT_TRACED = function(
            "pelton_client_submit_traced",
            JAVA_INT, JAVA_LONG, ADDRESS, JAVA_LONG, ADDRESS, JAVA_INT, JAVA_LONG, ADDRESS);
    static final MethodHandle CLIENT_NOTIFY =
            function("pelton_client_notify", JAVA_INT, JAVA_LONG, ADDRESS, JAVA_LONG, JAVA_LONG);
    static final MethodHandle CLIENT_RESERVE =
            function("pelton_client_reserve", JAVA_INT, JAVA_LONG, JAVA_LONG, JAVA_LONG, ADDRESS);
    static final MethodHandle CLIENT_ABORT = function("pelton_client_abort", JAVA_INT, JAVA_LONG);
    static final MethodHandle CLIENT_AWAIT =
            function("pelton_client_await", JAVA_INT, JAVA_LONG, JAVA_LONG, ADDRESS);
    static final MethodHandle CLIENT_RELEASE = function("pelton_client_release", JAVA_INT, JAVA_LONG);
    static final MethodHandle CLIENT_CANCEL = function("pelton_client_cancel", JAVA_INT, JAVA_LONG, JAVA_LONG);
    static final MethodHandle CLIENT_GET_INFO =
            function("pelton_client_get_info", JAVA_INT, JAVA_LONG, ADDRESS);
    static final MethodHandle CLIENT_FD = function("pelton_client_fd", JAVA_INT, JAVA_LONG);
    static final MethodHandle CLIENT_POLL = function("pelton_client_poll", JAVA_INT, JAVA_LONG);
    static final MethodHandle CLIENT_ARM = function("pelton_client_arm", JAVA_INT, JAVA_LONG);
    static final MethodHandle CLIENT_DISARM = function("pelton_client_disarm", JAVA_INT, JAVA_LONG);

    static final MethodHandle SERVICE_OPEN = opening("pelton_service_open");
    static final MethodHandle SERVICE_RECEIVE =
            function("pelton_service_receive", JAVA_INT, JAVA_LONG, JAVA_LONG, ADDRESS);
    static final MethodHandle SERVICE_RELEASE = function("pelton_service_release", JAVA_INT, JAVA_LONG);
    static final MethodHandle SERVICE_STOP = function("pelton_service_stop", JAVA_INT, JAVA_LONG);
    static final MethodHandle SERVICE_DRAIN = function("pelton_service_drain", JAVA_INT, JAVA_LONG);
    static final MethodHandle SERVICE_FD = function("pelton_service_fd", JAVA_INT, JAVA_LONG);
    static final MethodHandle SERVICE_POLL = function("pelton_service_poll", JAVA_INT, JAVA_LONG);
    static final MethodHandle SERVICE_ARM = function("pelton_service_arm", JAVA_INT, JAVA_LONG);
    static final MethodHandle SERVICE_DISARM = function("pelton_service_disarm", JAVA_INT, JAVA_LONG);
    static final MethodHandle RESPONDER_REPLY =
            function("pelton_responder_reply", JAVA_INT, JAVA_LONG, ADDRESS, JAVA_LONG);
    static final MethodHandle RESPONDER_FAIL =
            function("pelton_responder_fail", JAVA_INT, JAVA_LONG, JAVA_INT, ADDRESS, JAVA_LONG);
    static final MethodHandle RESPONDER_PART =
            function("pelton_responder_part", JAVA_INT, JAVA_LONG, ADDRESS, JAVA_LONG, JAVA_LONG);
    static final MethodHandle RESPONDER_END = function("pelton_responder_end", JAVA_INT, JAVA_LONG);
    static final MethodHandle RESPONDER_TRACEPARENT =
            function("pelton_responder_traceparent", JAVA_INT, JAVA_LONG, ADDRESS);
    static final MethodHandle RESPONDER_IS_CANCELLED =
            function("pelton_responder_is_cancelled", JAVA_INT, JAVA_LONG);

    static final MethodHandle APPENDERS_TO_RECORD_FILE =
            function("pelton_appenders_to_record_file", JAVA_INT, ADDRESS, ADDRESS, ADDRESS, ADDRESS);
    static final MethodHandle APPENDERS_APPENDER =
            function("pelton_appenders_appender", JAVA_INT, JAVA_LONG, ADDRESS);
    static final MethodHandle APPENDERS_FLUSH = function("pelton_appenders_flush", JAVA_INT, JAVA_LONG);
    static final MethodHandle APPENDERS_SYNC = function("pelton_appenders_sync", JAVA_INT, JAVA_LONG);
    static final MethodHandle APPENDER_RESERVE =
            function("pelton_appender_reserve", JAVA_INT, JAVA_LONG, JAVA_LONG, ADDRESS);
    static final MethodHandle APPENDER_COMMIT = function("pelton_appender_commit", JAVA_INT, JAVA_LONG, JAVA_LONG);
    static final MethodHandle APPENDER_ABORT = function("pelton_appender_abort", JAVA_INT, JAVA_LONG);
    static final MethodHandle RECORDS_OPEN = function("pelton_records_open", JAVA_INT, ADDRESS, ADDRESS);
    static final MethodHandle RECORDS_NEXT = function("pelton_records_next", JAVA_INT, JAVA_LONG, ADDRESS);

    static final MethodHandle ENGINE_OPEN = function("pelton_engine_open", JAVA_INT, ADDRESS, ADDRESS);
    static final MethodHandle ENGINE_SUBMIT =
            function("pelton_engine_submit", JAVA_INT, JAVA_LONG, ADDRESS, JAVA_LONG, ADDRESS);
    static final MethodHandle ENGINE_COMPLETIONS =
            function("pelton_engine_completions", JAVA_INT, JAVA_LONG, JAVA_LONG, ADDRESS, JAVA_LONG, ADDRESS);
    static final MethodHandle ENGINE_CANCEL = function("pelton_engine_cancel", JAVA_INT, JAVA_LONG, JAVA_LONG);
    static final MethodHandle ENGINE_FD = function("pelton_engine_fd", JAVA_INT, JAVA_LONG);
    static final MethodHandle ENGINE_ARM = function("pelton_engine_arm", JAVA_INT, JAVA_LONG);

    private static final MethodHandle DEADLINE = function("pelton_deadline", JAVA_LONG, JAVA_LONG);
    private static final MethodHandle ERROR_DETAIL = function("pelton_error_detail", TEXT);
    private static final MethodHandle CODE_TEXT = function("pelton_code_text", TEXT, JAVA_INT);

    private static final MethodHandle POLL = kernel("poll", JAVA_INT, ADDRESS, JAVA_LONG, JAVA_INT);
    private static final MethodHandle MALLOC = kernel("malloc", ADDRESS, JAVA_LONG);
    private static final MethodHandle FREE =
            LINKER.downcallHandle(LINKER.defaultLookup().findOrThrow("free"), FunctionDescriptor.ofVoid(ADDRESS));
    private static final MethodHandle STRERROR = kernel("strerror", TEXT, JAVA_INT);
    static final MethodHandle EPOLL_CREATE = kernel("epoll_create1", JAVA_INT, JAVA_INT);
    static final MethodHandle EPOLL_CTL = kernel("epoll_ctl", JAVA_INT, JAVA_INT, JAVA_INT, JAVA_INT, ADDRESS);
    static final MethodHandle EPOLL_WAIT = kernel("epoll_wait", JAVA_INT, JAVA_INT, ADDRESS, JAVA_INT, JAVA_INT);

    static {
        int version;
        try {
            version = (int) function("pelton_version", JAVA_INT).invokeExact();
        } catch (Throwable failure) {
            throw unexpected(failure);
        }
        if (version / 1000 != 2)
            throw new UnsatisfiedLinkError("libpelton has version %d.%d.%d, wanted 0.2: install that, or name another by "
                    .formatted(version / 1_000_000, version / 1000 % 1000, version % 1000) + "-Dpelton.library=PATH");
    }

    private Native() {}

    /** A name as a C string. A zero byte would end it early, so that it named another. */
    static MemorySegment text(String name, Arena arena) {
        int zero = name.indexOf('\0');
        if (zero >= 0) throw new IllegalArgumentException("found a zero byte at " + zero + ", wanted a name without one");
        return arena.allocateFrom(name);
    }

    /** The file that pelton.library names, else the library that the jar carries, else the system's. */
    private static SymbolLookup library() {
        String path = System.getProperty("pelton.library", "");
        try {
            byte[] carried = path.isEmpty() ? carried(Native.class::getResourceAsStream, System.getProperty("os.arch")) : null;
            if (carried != null) return unpacked(carried);
            return path.isEmpty()
                    ? SymbolLookup.libraryLookup("libpelton.so.0.2", Arena.global())
                    : SymbolLookup.libraryLookup(Path.of(path), Arena.global());
        } catch (IOException | IllegalArgumentException failure) {
            throw (Error) new UnsatisfiedLinkError("cannot load " + (path.isEmpty() ? "libpelton.so.0.2" : path)
                    + ": install libpelton, or name its file by -Dpelton.library=PATH").initCause(failure);
        }
    }

    /** The library for an architecture, by Java's name of it, or null. packages/java/build puts it there. */
    static byte @Nullable [] carried(Function<String, @Nullable InputStream> resources, String architecture)
            throws IOException {
        try (InputStream library = resources.apply("native/" + architecture + "/libpelton.so")) {
            return library == null ? null : library.readAllBytes();
        }
    }

    /** Loaded from memory of this process: no file is left, and no directory has to allow it. */
    private static SymbolLookup unpacked(byte[] library) throws IOException {
        int fd;
        try (Arena arena = Arena.ofConfined()) {
            fd = (int) kernel("memfd_create", JAVA_INT, ADDRESS, JAVA_INT)
                    .invokeExact(arena.allocateFrom("libpelton.so"), 1 /* MFD_CLOEXEC */);
        } catch (Throwable failure) {
            throw unexpected(failure);
        }
        if (fd < 0) throw new IOException("no memory for libpelton: memfd_create fails");
        Path file = Path.of("/proc/self/fd/" + fd);
        try {
            Files.write(file, library);
            // By its text: as a Path it would be resolved to a name that nobody can open.
            return SymbolLookup.libraryLookup(file.toString(), Arena.global());
        } finally {
            try {
                int closed = (int) kernel("close", JAVA_INT, JAVA_INT).invokeExact(fd);
                assert closed == 0;
            } catch (Throwable failure) {
                throw unexpected(failure);
            }
        }
    }

    private static MethodHandle function(String name, MemoryLayout result, MemoryLayout... parameters) {
        return LINKER.downcallHandle(LIBRARY.findOrThrow(name), FunctionDescriptor.of(result, parameters));
    }

    private static MethodHandle function(
            String name, Linker.Option option, MemoryLayout result, MemoryLayout... parameters) {
        return LINKER.downcallHandle(LIBRARY.findOrThrow(name), FunctionDescriptor.of(result, parameters), option);
    }

    private static MethodHandle opening(String name) {
        return function(name, JAVA_INT, ADDRESS, ADDRESS, ADDRESS);
    }

    private static MethodHandle kernel(String name, MemoryLayout result, MemoryLayout... parameters) {
        return LINKER.downcallHandle(
                LINKER.defaultLookup().findOrThrow(name), FunctionDescriptor.of(result, parameters));
    }

    /** What a downcall throws is no exception of C: a mistake of the binding's, or an error of the virtual machine. */
    static AssertionError unexpected(Throwable failure) {
        if (failure instanceof RuntimeException exception) throw exception;
        if (failure instanceof Error error) throw error;
        return new AssertionError(failure);
    }

    /** The text of a function (handle, out) that writes a traceparent, or null if there is none. */
    static @Nullable String traceparent(MethodHandle function, long address) {
        try (Arena arena = Arena.ofConfined()) {
            MemorySegment text = arena.allocate(TRACEPARENT_SIZE);
            int result = (int) function.invokeExact(address, text);
            PeltonException.check(result);
            return result == 1 ? text.getString(0) : null;
        } catch (Throwable failure) {
            throw unexpected(failure);
        }
    }

    /** The general text of a code, of which the library has said nothing more. */
    static String codeText(int code) {
        try {
            return ((MemorySegment) CODE_TEXT.invokeExact(code)).getString(0);
        } catch (Throwable failure) {
            throw unexpected(failure);
        }
    }

    static String errorText(int code) {
        try {
            String detail = ((MemorySegment) ERROR_DETAIL.invokeExact()).getString(0);
            return detail.isEmpty() ? codeText(code) : detail;
        } catch (Throwable failure) {
            throw unexpected(failure);
        }
    }

    /** Memory of C, for which {@link #free} must be called: any thread may use and free it. */
    static MemorySegment allocate(long bytes) {
        MemorySegment memory;
        try {
            memory = (MemorySegment) MALLOC.invokeExact(bytes);
        } catch (Throwable failure) {
            throw unexpected(failure);
        }
        if (memory.address() == 0) throw new OutOfMemoryError("no native memory for " + bytes + " bytes");
        return memory.reinterpret(bytes);
    }

    static void free(MemorySegment memory) {
        try {
            FREE.invokeExact(memory);
        } catch (Throwable failure) {
            throw unexpected(failure);
        }
    }

    /** The text of an error number of the kernel. */
    static String systemText(int error) {
        try {
            return ((MemorySegment) STRERROR.invokeExact(error)).getString(0);
        } catch (Throwable failure) {
            throw unexpected(failure);
        }
    }

    /** The time of CLOCK_MONOTONIC that is {@code timeout} from now. */
    static long deadline(Duration timeout) {
        return deadline(nanos(timeout));
    }

    /** One that is too long is for ever; a negative one may be 0. */
    static long nanos(Duration time) {
        try {
            return time.toNanos();
        } catch (ArithmeticException tooLong) {
            return time.isNegative() ? 0 : FOREVER;
        }
    }

    static long deadline(long timeoutNs) {
        try {
            return (long) DEADLINE.invokeExact(timeoutNs);
        } catch (Throwable failure) {
            throw unexpected(failure);
        }
    }

    /** The end of a call that waits: the deadline, or a slice from now. */
    static long slice(long deadlineNs) {
        return Math.min(deadlineNs, deadline(SLICE_NS));
    }

    static boolean isPast(long deadlineNs) {
        return deadlineNs != FOREVER && deadline(0L) >= deadlineNs;
    }

    /** Waits until the descriptor is readable, or the deadline. Returns whether it is. A virtual thread parks. */
    static boolean awaitReadable(int descriptor, long deadlineNs) throws InterruptedException {
        if (Thread.currentThread().isVirtual()) {
            try (Poller.Interest interest = Poller.interest(descriptor)) {
                return interest.await(deadlineNs);
            }
        }
        try (Arena arena = Arena.ofConfined()) {
            MemorySegment poll = arena.allocate(8, 4);
            while (true) {
                if (Thread.interrupted()) throw new InterruptedException();
                poll.set(JAVA_INT, 0, descriptor);
                poll.set(JAVA_SHORT, 4, (short) 1);
                long waitNs = Math.max(0, slice(deadlineNs) - deadline(0L));
                if ((int) POLL.invokeExact(poll, 1L, (int) ((waitNs + 999_999) / 1_000_000)) > 0) return true;
                if (isPast(deadlineNs)) return false;
            }
        } catch (InterruptedException interrupted) {
            throw interrupted;
        } catch (Throwable failure) {
            throw unexpected(failure);
        }
    }
}
