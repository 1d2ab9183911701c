package pelton;

import java.time.Duration;
import org.jspecify.annotations.Nullable;

/**
 * Options of a call. {@code with} methods return changed copies.
 *
 * @param timeout the longest wait for the whole reply; null waits without limit. The service gets the deadline, except
 *     with a request that is larger than a message of its lane
 * @param idempotent the call may be carried out twice: if its service ends before any of its reply has come, another
 *     process of the name gets it
 * @param traceparent the span of which the call is a part, in W3C's text; one that is not valid is as null
 */
public record CallOptions(@Nullable Duration timeout, boolean idempotent, @Nullable String traceparent) {
    /** No limit of time, carried out once at most, and no span. */
    public static final CallOptions DEFAULTS = new CallOptions(null, false, null);

    /** Returns a copy with this limit of time. */
    public CallOptions withTimeout(Duration timeout) {
        return new CallOptions(timeout, idempotent, traceparent);
    }

    /** Returns a copy that may be carried out twice. */
    public CallOptions withIdempotent(boolean idempotent) {
        return new CallOptions(timeout, idempotent, traceparent);
    }

    /** Returns a copy that is a part of this span. */
    public CallOptions withTraceparent(String traceparent) {
        return new CallOptions(timeout, idempotent, traceparent);
    }

    long deadlineNs() {
        return timeout == null ? Native.FOREVER : Native.deadline(timeout);
    }
}
