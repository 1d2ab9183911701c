package pelton;

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

    /** Opening has reached its deadline; the text says what it waited for. */
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
    static final int NO_LISTENER = -11;
    static final int TIMED_OUT = -34;

    /** The exception for a code that the calling thread's last call into the library returned. */
    static PeltonException of(int code) {
        String text = Native.errorText(code);
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
