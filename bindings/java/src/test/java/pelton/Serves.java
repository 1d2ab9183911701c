package pelton;

import java.util.concurrent.CyclicBarrier;

/**
 * A service in a process of its own, until the end of its input: it replies with the request, except to "hold", which
 * gets no reply, and to "together N", which gets one when N such requests are in their handlers.
 */
final class Serves {
    private static CyclicBarrier together;

    private Serves() {}

    public static void main(String[] arguments) throws Exception {
        try (Service service = Service.listen(arguments[0])) {
            Thread.ofPlatform().daemon().start(() -> {
                try {
                    while (System.in.read() >= 0) {}
                    service.drain();
                } catch (Exception failure) {
                    throw new AssertionError(failure);
                }
            });
            System.out.println("listens");
            service.run(request -> {
                String text = new String(request.bytes());
                if (text.equals("hold")) {
                    System.out.println("holds");
                    Thread.sleep(Long.MAX_VALUE);
                }
                if (text.startsWith("together ")) {
                    synchronized (Serves.class) {
                        if (together == null) together = new CyclicBarrier(Integer.parseInt(text.substring(9)));
                    }
                    together.await();
                }
                return request.bytes();
            });
        }
    }
}
