package pelton;

import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;

/** Starts the processes of tests. What they write to standard error is shown. */
final class Processes {
    private Processes() {}

    /** A class of the tests in a virtual machine of its own, with two carriers. */
    static Process java(Class<?> main, String... arguments) throws Exception {
        return started(
                new ProcessBuilder(
                        Path.of(System.getProperty("java.home"), "bin", "java").toString(),
                        "--enable-native-access=ALL-UNNAMED",
                        "-XX:+UseSerialGC",
                        "-XX:TieredStopAtLevel=1",
                        "-Djdk.virtualThreadScheduler.parallelism=2",
                        "-Djdk.virtualThreadScheduler.maxPoolSize=2",
                        "-Dpelton.library=" + System.getProperty("pelton.library"),
                        "-cp",
                        System.getProperty("java.class.path"),
                        main.getName()),
                arguments);
    }

    /** The pelton command. */
    static Process pelton(String... arguments) throws Exception {
        return started(new ProcessBuilder(System.getProperty("pelton.tool")), arguments);
    }

    /** The pelton command, which writes to a file. */
    static Process peltonInto(Path output, String... arguments) throws Exception {
        return started(
                new ProcessBuilder(System.getProperty("pelton.tool")).redirectOutput(output.toFile()), arguments);
    }

    private static Process started(ProcessBuilder builder, String... arguments) throws Exception {
        List<String> command = new ArrayList<>(builder.command());
        command.addAll(List.of(arguments));
        return builder.command(command).redirectError(ProcessBuilder.Redirect.INHERIT).start();
    }

    /** Kills a process, whose output can be read still: {@link Process#destroyForcibly} closes it. */
    static void kill(Process process) throws InterruptedException {
        process.toHandle().destroyForcibly();
        process.waitFor();
    }
}
