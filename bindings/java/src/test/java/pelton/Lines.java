package pelton;

import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.UncheckedIOException;

/** Standard output: a line is one write, so that a kill leaves none in part. */
final class Lines {
    private static final FileOutputStream OUTPUT = new FileOutputStream(FileDescriptor.out);

    private Lines() {}

    static void write(String line) {
        try {
            OUTPUT.write((line + "\n").getBytes());
        } catch (IOException failure) {
            throw new UncheckedIOException(failure);
        }
    }
}
