/* Lines published in a directory, and an audit that misses none of them, however often either side is killed.
 *
 *     durable publish DIR    publishes the lines of its input
 *     durable audit DIR      prints each line, until the publisher has closed
 *
 * An audit that is killed continues at the first line that it has not released. So that line may be printed twice. */
#include <pelton.h>
#include <stdio.h>
#include <string.h>

static int give_up(const char *what, int code) {
    fprintf(stderr, "%s: %s: %s\n", what, pelton_code_text(code), pelton_error_detail());
    return 1;
}

static int publish(const char *name) {
    pelton_publisher *publisher;
    char line[1000];
    int code = pelton_publisher_open(name, NULL, &publisher);
    if (code != PELTON_OK) return give_up(name, code);
    /* A durable subscription counts, also while no process uses it. */
    code = pelton_publisher_wait_subscribers(publisher, 1, PELTON_FOREVER);
    while (code == PELTON_OK && fgets(line, sizeof line, stdin)) {
        code = pelton_publisher_send(publisher, line, strlen(line), PELTON_FOREVER);
    }
    if (code != PELTON_OK) return give_up("publishing", code);
    return pelton_close(publisher) != PELTON_OK;
}

static int audit(const char *name) {
    pelton_subscriber_options options = PELTON_SUBSCRIBER_OPTIONS_INIT;
    pelton_subscriber *subscriber;
    pelton_delivery delivery;
    options.durable = "audit";
    options.deadline_ns = pelton_deadline(INT64_C(10000000000));
    int code = pelton_subscriber_open(name, &options, &subscriber);
    if (code != PELTON_OK) return give_up(name, code);
    while ((code = pelton_subscriber_receive(subscriber, PELTON_FOREVER, &delivery)) == PELTON_OK) {
        fwrite(delivery.data, 1, delivery.size, stdout);
        fflush(stdout);
        pelton_subscriber_release(subscriber);
    }
    if (code != PELTON_CLOSED && code != PELTON_PEER_DIED) return give_up("receiving", code);
    return pelton_close(subscriber) != PELTON_OK;
}

int main(int count, char **arguments) {
    char name[1000];
    int is_audit = count == 3 && strcmp(arguments[1], "audit") == 0;
    if (!is_audit && !(count == 3 && strcmp(arguments[1], "publish") == 0)) {
        fprintf(stderr, "usage: durable publish|audit DIR\n");
        return 2;
    }
    snprintf(name, sizeof name, "path:%s", arguments[2]);
    return is_audit ? audit(name) : publish(name);
}
