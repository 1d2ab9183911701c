/* The module: the directive `pelton_service`, the end of a request, the end of a worker.
 *
 *     pelton_service NAME ADDRESS [timeout=TIME] [capacity=SIZE] [call_bytes_max=SIZE] [parts_bytes_max=SIZE]
 *                    [user=USER]...;
 */
#include "ngx_pelton.h"

#include <pwd.h>

/* The library's limits of a lane. */
#define NGX_PELTON_CAPACITY_MIN 4096
#define NGX_PELTON_CAPACITY_MAX ((off_t)1 << 34)
/* An int64_t in nanoseconds, and a timer of nginx, can be so long. */
#define NGX_PELTON_TIMEOUT_MAX 2000000000

typedef struct {
    ngx_str_t name;
    ngx_str_t address;
    ngx_pelton_options_t options;
    ngx_msec_t timeout; /* 0: Lua's default */
} ngx_pelton_configured_t;

static char *ngx_pelton_service_directive(ngx_conf_t *cf, ngx_command_t *command, void *conf);
static void *ngx_pelton_create_conf(ngx_conf_t *cf);
static ngx_int_t ngx_pelton_init_process(ngx_cycle_t *cycle);
static void ngx_pelton_exit_process(ngx_cycle_t *cycle);

static ngx_command_t ngx_pelton_commands[] = {
    {ngx_string("pelton_service"), NGX_HTTP_MAIN_CONF | NGX_CONF_2MORE, ngx_pelton_service_directive,
     NGX_HTTP_MAIN_CONF_OFFSET, 0, NULL},
    ngx_null_command};

static ngx_http_module_t ngx_pelton_module_ctx = {
    NULL, NULL, ngx_pelton_create_conf, NULL, NULL, NULL, NULL, NULL};

ngx_module_t ngx_pelton_module = {NGX_MODULE_V1,
                                  &ngx_pelton_module_ctx,
                                  ngx_pelton_commands,
                                  NGX_HTTP_MODULE,
                                  NULL, /* init master */
                                  NULL, /* init module */
                                  ngx_pelton_init_process,
                                  NULL, /* init thread */
                                  NULL, /* exit thread */
                                  ngx_pelton_exit_process,
                                  NULL, /* exit master */
                                  NGX_MODULE_V1_PADDING};

/* ---- The log ----------------------------------------------------------------------------------------------------- */

/* In the worker's only thread: those of the library do not log. The log is that of the present cycle: a reload with
   `master_process off` destroys the cycle before it. nginx counts priorities from 1, syslog from 0. */
static void ngx_pelton_log(void *context, int priority, const char *text) {
    (void)context;
    ngx_log_error((ngx_uint_t)priority + 1, ngx_cycle->log, 0, "pelton: %s", text);
}

static ngx_int_t ngx_pelton_init_process(ngx_cycle_t *cycle) {
    (void)cycle;
    pelton_set_log(ngx_pelton_log, NULL);
    return NGX_OK;
}

/* ---- The directive ----------------------------------------------------------------------------------------------- */

/* Of ngx_pelton_configured_t. */
static void *ngx_pelton_create_conf(ngx_conf_t *cf) {
    return ngx_array_create(cf->pool, 4, sizeof(ngx_pelton_configured_t));
}

/* NULL, or what is wrong: what the library would find at the first call. */
static const char *ngx_pelton_check_address(const ngx_str_t *address) {
    struct sockaddr_un socket;
    size_t i;
    if (address->len > 5 && ngx_strncmp(address->data, "unix:", 5) == 0) {
        if (address->data[5] != '/') {
            return "the path of the socket is not absolute";
        }
        return address->len - 5 < sizeof socket.sun_path ? NULL : "the path of the socket is too long";
    }
    for (i = 0; i < address->len; i++) {
        u_char c = address->data[i];
        if (!isalnum(c) && c != '_' && c != '-' && (c != '.' || i == 0)) {
            return "neither \"unix:PATH\" nor a short name";
        }
    }
    return address->len > 0 && address->len <= 64 ? NULL : "neither \"unix:PATH\" nor a short name";
}

static ngx_int_t ngx_pelton_parse_bytes(ngx_str_t *text, off_t min, off_t max, uint64_t *out) {
    off_t bytes = ngx_parse_offset(text);
    if (bytes < min || bytes > max) {
        return NGX_ERROR;
    }
    *out = (uint64_t)bytes;
    return NGX_OK;
}

/* A number, or a name. */
static ngx_int_t ngx_pelton_parse_user(ngx_str_t *text, ngx_pelton_options_t *options) {
    ngx_int_t uid = ngx_atoi(text->data, text->len);
    if (uid == NGX_ERROR) {
        struct passwd *user = getpwnam((const char *)text->data);
        if (user == NULL) {
            return NGX_ERROR;
        }
        uid = user->pw_uid;
    }
    if (uid >= UINT32_MAX || options->uid_count == NGX_PELTON_UIDS_MAX) {
        return NGX_ERROR;
    }
    options->uids[options->uid_count++] = (uint32_t)uid;
    return NGX_OK;
}

static ngx_int_t ngx_pelton_parse_parameter(const ngx_str_t *parameter, ngx_pelton_configured_t *service) {
    ngx_pelton_options_t *options = &service->options;
    u_char *value = ngx_strlchr(parameter->data, parameter->data + parameter->len, '=');
    size_t key;
    ngx_str_t text;
    if (value == NULL) {
        return NGX_ERROR;
    }
    key = (size_t)(value++ - parameter->data);
    text.data = value;
    text.len = parameter->len - key - 1;
#define NGX_PELTON_IS(name) (key == sizeof(name) - 1 && ngx_strncmp(parameter->data, name, key) == 0)
    if (NGX_PELTON_IS("timeout")) {
        ngx_int_t msec = ngx_parse_time(&text, 0);
        service->timeout = (ngx_msec_t)msec;
        return msec > 0 && msec < NGX_PELTON_TIMEOUT_MAX ? NGX_OK : NGX_ERROR;
    } else if (NGX_PELTON_IS("capacity")) {
        return ngx_pelton_parse_bytes(&text, NGX_PELTON_CAPACITY_MIN, NGX_PELTON_CAPACITY_MAX, &options->capacity);
    } else if (NGX_PELTON_IS("call_bytes_max")) {
        return ngx_pelton_parse_bytes(&text, 1, INT32_MAX, &options->call_bytes_max);
    } else if (NGX_PELTON_IS("parts_bytes_max")) {
        return ngx_pelton_parse_bytes(&text, 1, NGX_MAX_OFF_T_VALUE, &options->parts_bytes_max);
    } else if (NGX_PELTON_IS("user")) {
        return ngx_pelton_parse_user(&text, options);
    }
#undef NGX_PELTON_IS
    return NGX_ERROR;
}

static char *ngx_pelton_service_directive(ngx_conf_t *cf, ngx_command_t *command, void *conf) {
    ngx_array_t *services = conf;
    ngx_pelton_configured_t *service = services->elts;
    ngx_str_t *value = cf->args->elts;
    const char *problem = ngx_pelton_check_address(&value[2]);
    ngx_uint_t i;
    (void)command;
    for (i = 0; i < services->nelts; i++) {
        if (service[i].name.len == value[1].len && ngx_strcmp(service[i].name.data, value[1].data) == 0) {
            ngx_conf_log_error(NGX_LOG_EMERG, cf, 0, "duplicate pelton_service \"%V\"", &value[1]);
            return NGX_CONF_ERROR;
        }
    }
    if (problem != NULL) {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0, "invalid address \"%V\": %s", &value[2], problem);
        return NGX_CONF_ERROR;
    }
    service = ngx_array_push(services);
    if (service == NULL) {
        return NGX_CONF_ERROR;
    }
    ngx_memzero(service, sizeof *service);
    service->name = value[1];
    service->address = value[2];
    for (i = 3; i < cf->args->nelts; i++) {
        if (ngx_pelton_parse_parameter(&value[i], service) != NGX_OK) {
            ngx_conf_log_error(NGX_LOG_EMERG, cf, 0, "invalid parameter \"%V\"", &value[i]);
            return NGX_CONF_ERROR;
        }
    }
    return NGX_CONF_OK;
}

ngx_pelton_service_t *ngx_pelton_configured(const char *name, double *timeout) {
    ngx_array_t *services = ngx_http_cycle_get_module_main_conf(ngx_cycle, ngx_pelton_module);
    ngx_pelton_configured_t *service = services->elts;
    ngx_uint_t i;
    for (i = 0; i < services->nelts; i++) {
        if (ngx_strcmp(service[i].name.data, name) == 0) {
            *timeout = (double)service[i].timeout;
            return ngx_pelton_service((const char *)service[i].address.data, &service[i].options);
        }
    }
    return NULL;
}

/* ---- The end of a request, and of a worker ----------------------------------------------------------------------- */

static void ngx_pelton_request_ended(void *data) {
    ngx_queue_t *slots = data;
    while (!ngx_queue_empty(slots)) {
        ngx_pelton_free_slot(ngx_queue_data(ngx_queue_head(slots), ngx_pelton_slot_t, of_request));
    }
}

/* An internal redirect clears the request's contexts: then it has another list, and the first one stays as it is. */
int ngx_pelton_bind(double ticket, ngx_http_request_t *request) {
    ngx_pelton_slot_t *slot = ngx_pelton_find_slot(ticket, NULL);
    ngx_queue_t *slots = ngx_http_get_module_ctx(request, ngx_pelton_module);
    if (slot == NULL) {
        return PELTON_CLOSED;
    }
    if (slots == NULL) {
        ngx_pool_cleanup_t *cleanup = ngx_pool_cleanup_add(request->pool, sizeof *slots);
        if (cleanup == NULL) {
            return PELTON_SYSTEM;
        }
        slots = cleanup->data;
        ngx_queue_init(slots);
        cleanup->handler = ngx_pelton_request_ended;
        ngx_http_set_ctx(request, slots, ngx_pelton_module);
    }
    ngx_queue_insert_tail(slots, &slot->of_request);
    slot->is_bound = 1;
    return PELTON_OK;
}

/* The services see the clients close, and nginx finds no connection of this module open. */
static void ngx_pelton_exit_process(ngx_cycle_t *cycle) {
    (void)cycle;
    ngx_pelton_close_slots();
    ngx_pelton_close_calls();
    ngx_pelton_close_files();
}
