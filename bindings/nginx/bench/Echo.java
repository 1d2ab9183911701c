import java.io.EOFException;
import java.io.IOException;
import java.net.StandardProtocolFamily;
import java.net.UnixDomainSocketAddress;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.ServerSocketChannel;
import java.nio.channels.SocketChannel;
import pelton.Request;
import pelton.Service;

/**
 * Answers each request with its own bytes: by pelton, on the thread that receives it, or on a Unix stream socket, by a
 * virtual thread for each connection, where a message is a length in four little-endian bytes and the payload.
 *
 * <pre>
 * java Echo.java pelton NAME
 * java Echo.java socket PATH
 * </pre>
 */
final class Echo {
    private Echo() {}

    public static void main(String[] arguments) throws Exception {
        switch (arguments[0]) {
            case "pelton" -> {
                try (Service service = Service.listen(arguments[1])) {
                    service.run(Request::bytes, Runnable::run);
                }
            }
            case "socket" -> {
                try (ServerSocketChannel listener = ServerSocketChannel.open(StandardProtocolFamily.UNIX)) {
                    listener.bind(UnixDomainSocketAddress.of(arguments[1]), 4096);
                    while (true) {
                        SocketChannel connection = listener.accept();
                        Thread.ofVirtual().start(() -> serve(connection));
                    }
                }
            }
            default -> throw new IllegalArgumentException("found " + arguments[0] + ", wanted pelton or socket");
        }
    }

    private static void serve(SocketChannel connection) {
        ByteBuffer buffer = ByteBuffer.allocateDirect(128 << 10).order(ByteOrder.LITTLE_ENDIAN);
        try (connection) {
            while (true) {
                read(connection, buffer, 4);
                int size = 4 + buffer.getInt(0);
                read(connection, buffer, size);
                int end = buffer.position();
                buffer.flip().limit(size);
                while (buffer.hasRemaining()) connection.write(buffer);
                buffer.limit(end).compact();
            }
        } catch (EOFException ended) {
            // The client has closed the connection.
        } catch (IOException failure) {
            System.err.println(failure);
        }
    }

    /** Fills the buffer up to at least so many bytes. */
    private static void read(SocketChannel connection, ByteBuffer buffer, int bytes) throws IOException {
        while (buffer.position() < bytes) if (connection.read(buffer) < 0) throw new EOFException();
    }
}
