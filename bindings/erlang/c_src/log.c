/* What libpelton logs, for one process. The thread that logs may be in a call of the NIF, with locks of both, and may
 * be a scheduler without an environment. So it queues the record, and the notifier thread sends it. */
#include "nif.h"
#include "functions.h"

/* Records that wait for the notifier thread, at most; further ones are dropped. A guess. */
#define QUEUED_MAX 256

struct log_record {
    struct log_record *next;
    int priority;
    size_t bytes;
    char text[];
};

/* pelton_log of pelton.h. */
static void queue(void *context, int priority, const char *text)
{
    (void)context;
    size_t bytes = strlen(text);
    struct log_record *record = enif_alloc(sizeof *record + bytes);
    if (!record)
        return;
    *record = (struct log_record){.priority = priority, .bytes = bytes};
    memcpy(record->text, text, bytes);
    enif_mutex_lock(shared->log_lock);
    bool is_queued = shared->log_count < QUEUED_MAX;
    if (is_queued) {
        struct log_record **end = &shared->log_records;
        while (*end)
            end = &(*end)->next;
        *end = record;
        shared->log_count++;
    }
    enif_mutex_unlock(shared->log_lock);
    if (is_queued)
        notifier_wake();
    else
        enif_free(record);
}

void log_send(void)
{
    enif_mutex_lock(shared->log_lock);
    struct log_record *record = shared->log_records, *next;
    ErlNifPid receiver = shared->log_receiver;
    shared->log_records = NULL;
    shared->log_count = 0;
    enif_mutex_unlock(shared->log_lock);
    for (; record; record = next) {
        next = record->next;
        ErlNifEnv *env = enif_alloc_env();
        if (env) {
            ERL_NIF_TERM level = record->priority == 3 ? atom_error : record->priority == 4 ? atom_warning : atom_info;
            ERL_NIF_TERM text = bytes_of(env, record->text, record->bytes);
            enif_send(NULL, &receiver, env, enif_make_tuple3(env, atom_pelton_log, level, text));
            enif_free_env(env);
        }
        enif_free(record);
    }
}

/* set_log(Pid | none) */
NIF(set_log)
{
    (void)argc;
    ErlNifPid receiver;
    if (argv[0] == atom_none) {
        pelton_set_log(NULL, NULL);
        return atom_ok;
    }
    if (!enif_get_local_pid(env, argv[0], &receiver))
        return enif_make_badarg(env);
    enif_mutex_lock(shared->log_lock);
    shared->log_receiver = receiver;
    enif_mutex_unlock(shared->log_lock);
    pelton_set_log(queue, NULL);
    return atom_ok;
}
