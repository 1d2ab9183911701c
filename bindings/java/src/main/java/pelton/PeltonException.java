package pelton;

import java.nio.charset.StandardCharsets;

/**
 * Every error of pelton. The message says what was found, what was wanted, and what to do. Full, empty and a passed
 * timeout are answers of the methods, not errors.
 */
public sealed class PeltonException extends RuntimeException {
    private static final long serialVersionUID = 1;

    private final int code;

    private PeltonException(int code, String text) {
        super(text);
        this.code = code;
    }

    /** Returns the number of the error in {@code pelton/result.h}, for instance -4 for a message that is too large. */
    public int code() {
        return code;
    }

    /** The peer has closed: the ordinary end of a channel. A receiver has received every message. */
    public static final class Closed extends PeltonException {
        private static final long serialVersionUID = 1;

        Closed(String text) {
            super(CLOSED, text);
        }
    }

    /** The peer's process ended without closing. {@code resume} waits for its successor. */
    public static final class PeerDied extends PeltonException {
        private static final long serialVersionUID = 1;

        PeerDied(String text) {
            super(PEER_DIED, text);
        }
    }

    /** The message is larger than the channel permits: send smaller ones, or open the channel with a larger limit. */
    public static final class TooLarge extends PeltonException {
        private static final long serialVersionUID = 1;

        TooLarge(String text) {
            super(TOO_LARGE, text);
        }
    }

    /** No process listens under the name: start it first, or open with a timeout. */
    public static final class NoListener extends PeltonException {
        private static final long serialVersionUID = 1;

        NoListener(String text) {
            super(NO_LISTENER, text);
        }
    }

    /**
     * The service failed the call, with a code and bytes of its own. A handler throws it to fail its call so. {@link
     * #code} is then the service's, unsigned; 1 is another exception of its handler, and codes from 0xffff0000 are
     * pelton's own.
     */
    public static final class Failed extends PeltonException {
        private static final long serialVersionUID = 1;

        private final byte[] bytes;

        /** Creates one to throw in a handler. */
        public Failed(int code, byte[] bytes) {
            super(code, "the service failed the call with code " + Integer.toUnsignedString(code) + ": "
                    + new String(bytes, StandardCharsets.UTF_8));
            this.bytes = bytes.clone();
        }

        /** As {@link #Failed(int, byte[])}, with a text. */
        public Failed(int code, String text) {
            this(code, text.getBytes(StandardCharsets.UTF_8));
        }

        /** Returns the bytes as the service sent them. */
        public byte[] bytes() {
            return bytes.clone();
        }
    }

    /** The service dropped the call without a reply. {@link #code} is 0. */
    public static final class Abandoned extends PeltonException {
        private static final long serialVersionUID = 1;

        Abandoned() {
            super(OK, "the service dropped the call without a reply: see its log");
        }
    }

    /** Opening, or a call, has reached its deadline; the text says what it waited for. */
    public static final class TimedOut extends PeltonException {
        private static final long serialVersionUID = 1;

        TimedOut(String text) {
            super(TIMED_OUT, text);
        }
    }

    static final int OK = 0;
    static final int READY = 1;
    static final int AGAIN = -1;
    static final int CLOSED = -2;
    static final int PEER_DIED = -3;
    static final int TOO_LARGE = -4;
    static final int REFUSED = -9;
    static final int NO_LISTENER = -11;
    static final int TIMED_OUT = -34;

    /** The exception for a code that the calling thread's last call into the library returned. */
    static PeltonException of(int code) {
        return of(code, Native.errorText(code));
    }

    static PeltonException of(int code, String text) {
        return switch (code) {
            case CLOSED -> new Closed(text);
            case PEER_DIED -> new PeerDied(text);
            case TOO_LARGE -> new TooLarge(text);
            case NO_LISTENER -> new NoListener(text);
            case TIMED_OUT -> new TimedOut(text);
            default -> new PeltonException(code, text);
        };
    }

    /** Throws for a negative code. */
    static void check(int code) {
        if (code < 0) throw of(code);
    }
}
