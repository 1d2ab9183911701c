package pelton;

/** What a {@link Publisher} does when a {@link Subscriber} falls behind. */
public enum Policy {
    /** It waits for the subscriber once the lane is full: nothing is lost. */
    GATE,
    /** It goes on: the subscriber misses messages, and learns how many. */
    LAG,
    /** The subscriber receives the newest message, and skips those before. */
    LATEST;

    static Policy of(int number) {
        return values()[number];
    }
}
