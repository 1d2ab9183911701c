package pelton;

import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.logging.ErrorManager;
import java.util.logging.Formatter;
import java.util.logging.Handler;
import java.util.logging.LogRecord;
import java.util.logging.SimpleFormatter;

/**
 * Writes the records of {@code java.util.logging} to a {@link RecordFile}: each one, as its {@link Formatter} formats
 * it, is a message in UTF-8. {@code pelton cat} prints them.
 */
public final class RecordFileHandler extends Handler {
    private final RecordFile file;

    /**
     * Opens the file, as {@link RecordFile#open(Path, RecordFileOptions)}. The formatter is a {@link SimpleFormatter}
     * until {@link #setFormatter}.
     */
    public RecordFileHandler(Path path, RecordFileOptions options) {
        file = RecordFile.open(path, options);
        setFormatter(new SimpleFormatter());
    }

    /** Appends the record. Waits only for the file, when the buffer is full. Errors go to the {@link ErrorManager}. */
    @Override
    public void publish(LogRecord record) {
        if (!isLoggable(record)) return;
        try {
            String text = getFormatter().format(record);
            // Each message is a line of its own for those that print it.
            if (text.endsWith("\n")) text = text.substring(0, text.length() - 1);
            file.append(text.getBytes(StandardCharsets.UTF_8));
        } catch (RuntimeException failure) {
            reportError(null, failure, ErrorManager.WRITE_FAILURE);
        }
    }

    /** Writes what was appended. Errors go to the {@link ErrorManager}. */
    @Override
    public void flush() {
        try {
            file.flush();
        } catch (RuntimeException failure) {
            reportError(null, failure, ErrorManager.FLUSH_FAILURE);
        }
    }

    /** Syncs and closes the file. Errors go to the {@link ErrorManager}. */
    @Override
    public void close() {
        try {
            file.close();
        } catch (RuntimeException failure) {
            reportError(null, failure, ErrorManager.CLOSE_FAILURE);
        }
    }
}
