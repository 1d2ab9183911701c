package pelton;

/**
 * A message that a {@link Subscriber} has received.
 *
 * @param data a copy of its bytes
 * @param number each publisher counts its messages from 1
 * @param missed messages that the subscriber has missed directly before this one
 */
public record Delivery(byte[] data, long number, long missed) {}
