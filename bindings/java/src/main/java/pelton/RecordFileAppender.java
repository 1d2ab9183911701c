package pelton;

import ch.qos.logback.classic.spi.ILoggingEvent;
import ch.qos.logback.core.UnsynchronizedAppenderBase;
import ch.qos.logback.core.encoder.Encoder;
import java.nio.file.Path;
import java.util.Arrays;
import org.jspecify.annotations.Nullable;

/**
 * Writes the events of Logback, and so of SLF4J, to a {@link RecordFile}: each one, as its encoder encodes it, is a
 * message. {@code pelton cat} prints them. Errors go to Logback's status.
 *
 * <pre>{@code
 * <appender name="RECORDS" class="pelton.RecordFileAppender">
 *   <file>log.records</file>
 *   <encoder><pattern>%d %level %logger %msg%n</pattern></encoder>
 * </appender>
 * }</pre>
 */
@SuppressWarnings("exports") // Logback's types: its users have it, and others need not (module-info.java).
public final class RecordFileAppender extends UnsynchronizedAppenderBase<ILoggingEvent> {
    private @Nullable String file;
    private @Nullable Encoder<ILoggingEvent> encoder;
    private @Nullable RecordFile records;

    /** Creates one that is not started: Logback does, and sets what its configuration says. */
    public RecordFileAppender() {}

    /** Sets the path of the record file. */
    public void setFile(String path) {
        file = path;
    }

    /** Sets the encoder of a message. The end of the line that it writes is left out. */
    public void setEncoder(Encoder<ILoggingEvent> encoder) {
        this.encoder = encoder;
    }

    /** Opens the file, as {@link RecordFile#open(Path)}. */
    @Override
    public void start() {
        if (file == null || encoder == null) {
            addError("the appender " + getName() + " has no " + (file == null ? "<file>" : "<encoder>") + ": add one");
            return;
        }
        try {
            records = RecordFile.open(Path.of(file));
            super.start();
        } catch (PeltonException failure) {
            addError("the appender " + getName() + " cannot open " + file, failure);
        }
    }

    /** Appends the event. Waits only for other threads' calls, and for the file when the buffer is full. */
    @Override
    protected void append(ILoggingEvent event) {
        if (encoder == null || records == null) throw new IllegalStateException("the appender is not started");
        byte[] bytes = encoder.encode(event);
        boolean hasEnd = bytes.length > 0 && bytes[bytes.length - 1] == '\n';
        records.append(hasEnd ? Arrays.copyOf(bytes, bytes.length - 1) : bytes);
    }

    /** Syncs and closes the file. */
    @Override
    public void stop() {
        if (!isStarted()) return;
        super.stop();
        try {
            if (records != null) records.close();
        } catch (PeltonException failure) {
            addError("the appender " + getName() + " cannot sync " + file + ": its last messages may be missing", failure);
        }
    }
}
