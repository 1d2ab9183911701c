/* llhttp's parser is compiled twice, with and without the instructions of SSE 4.2, which read 16 bytes of a value or
 * target at a time. Each processor of x86-64 since 2009 has them, but a package is compiled for all. */
#include <llhttp.h>

int llhttp_execute_any(llhttp__internal_t *llhttp, const char *from, const char *end);
int llhttp_execute_sse42(llhttp__internal_t *llhttp, const char *from, const char *end);
int llhttp__internal_execute(llhttp__internal_t *llhttp, const char *from, const char *end);

int llhttp__internal_execute(llhttp__internal_t *llhttp, const char *from, const char *end) {
    return __builtin_cpu_supports("sse4.2") ? llhttp_execute_sse42(llhttp, from, end)
                                            : llhttp_execute_any(llhttp, from, end);
}
