#include "nif.h"
int ends_load(ErlNifEnv *env, ErlNifResourceFlags flags) { (void)env, (void)flags; return 0; }
void ends_ready(enum watched *end) { (void)end; }
void ends_bury(void) {}
void ends_end(void) {}
