/** Messages at memory speed between the threads and processes of one Linux machine. */
module pelton {
    exports pelton;

    requires transitive java.logging;
    requires static transitive org.jspecify;
    requires static transitive ch.qos.logback.classic;
    requires static transitive ch.qos.logback.core;
}
