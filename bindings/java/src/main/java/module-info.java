/** Messages at memory speed between the threads and processes of one Linux machine. */
module pelton {
    exports pelton;

    requires transitive java.logging;
    requires static transitive org.jspecify;
    // Not transitive: a module that requires pelton would have to have Logback.
    requires static ch.qos.logback.classic;
    requires static ch.qos.logback.core;
}
