/* Threads that log to one file. A thread waits for another only while that writes a full buffer to the file.
 *
 *     append FILE THREADS LINES     each thread appends so many lines
 *     append FILE                   prints its lines
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pelton.h"

static void check(int code, const char *what) {
    if (code == PELTON_OK) return;
    fprintf(stderr, "%s: %s: %s\n", what, pelton_code_text(code), pelton_error_detail());
    exit(1);
}

static pelton_appenders *appenders;
static int lines;

static void *log_lines(void *name) {
    pelton_appender *appender;
    char line[100];
    check(pelton_appenders_appender(appenders, &appender), "opening");
    for (int i = 0; i < lines; i++) {
        int size = snprintf(line, sizeof line, "%s: line %d", (const char *)name, i);
        check(pelton_appender_append(appender, line, (size_t)size), "appending");
    }
    pelton_close(appender);
    return NULL;
}

static void print(const char *file) {
    pelton_records *records;
    pelton_record record;
    int code;
    check(pelton_records_open(file, &records), "opening");
    while ((code = pelton_records_next(records, &record)) == PELTON_OK) printf("%.*s\n", (int)record.size, (const char *)record.data);
    if (code != PELTON_AGAIN) check(code, "reading");
    pelton_close(records);
}

enum { MOST = 64 };

int main(int argc, char **argv) {
    int count = argc == 4 ? atoi(argv[2]) : 0;
    if (argc != 2 && (count < 1 || count > MOST)) {
        fprintf(stderr, "usage: append FILE THREADS LINES | append FILE; at most %d threads\n", MOST);
        return 2;
    }
    if (argc == 4) {
        pthread_t threads[MOST];
        char names[MOST][20];
        lines = atoi(argv[3]);
        check(pelton_appenders_to_record_file(argv[1], NULL, NULL, &appenders), "opening");
        for (int i = 0; i < count; i++) {
            snprintf(names[i], sizeof names[i], "thread %d", i);
            if (pthread_create(&threads[i], NULL, log_lines, names[i]) != 0) return 1;
        }
        for (int i = 0; i < count; i++) pthread_join(threads[i], NULL);
        /* On the disk. */
        check(pelton_appenders_sync(appenders), "writing to the disk");
        pelton_close(appenders);
    } else {
        print(argv[1]);
    }
    return 0;
}
