/**
 * Messages at memory speed between the threads and processes of one Linux machine.
 *
 * <p>A {@link pelton.Sender} and a {@link pelton.Receiver} are the two endpoints of a channel. One thread at a time
 * uses an endpoint: the binding throws {@link java.lang.WrongThreadException} otherwise. Any number of threads share a
 * {@link pelton.Client}, which calls a {@link pelton.Service}, a {@link pelton.RecordFile}, and {@link pelton.Files}. A
 * wait parks a virtual thread, and an interrupt ends the wait of any thread without the loss of a message.
 */
@NullMarked
package pelton;

import org.jspecify.annotations.NullMarked;
