package pelton;

import java.time.Duration;
import org.jspecify.annotations.Nullable;

/**
 * A subscriber, as {@link Publisher#subscribers} shows it.
 *
 * @param pid its process; of a thread, this one; 0: a durable subscription that no process uses
 * @param uid its user
 * @param durable the name of its durable subscription, or null
 * @param policy its policy
 * @param lagAfter with {@link Policy#GATE}: how long the publisher waits for it at one message, or null for no limit
 * @param lags whether the publisher does not wait for it now
 * @param behind messages sent and not released by it
 * @param messages messages that it says to have received
 * @param missed messages that it says to have missed
 * @param holds how long it has been holding the publisher up, or null
 */
public record SubscriberState(
        int pid,
        int uid,
        @Nullable String durable,
        Policy policy,
        @Nullable Duration lagAfter,
        boolean lags,
        long behind,
        long messages,
        long missed,
        @Nullable Duration holds) {}
