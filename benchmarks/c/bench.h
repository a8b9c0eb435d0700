// What the parts of the plain C side share: the context, the request, and how tokens get in.
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llama.h"

extern struct llama_context * ctx;
extern struct llama_batch     batch;
extern llama_memory_t         mem;
extern int                    n_vocab, n_seq_max;
extern uint8_t *              blob;  // the state that is kept
extern size_t                 blob_size;
extern volatile int64_t       sink;  // where results go, so that no call is left out

double       now(void);
const char * find(const char * key);  // the value of a key of the request, NULL without one
long         number(const char * key, long otherwise);
const char * text(const char * key);  // good until the next call
static inline bool is(const char * value, const char * other) { return strcmp(value, other) == 0; }

// Tokens [from, from + n) of a sequence, at the same positions, with logits for the last.
void put(int from, int n, int seq, bool append);
void decode(void);
void extend(int seq, int n);
int  token_at(int i);

// bench_calls.c: what the sequences but 0 hold before a call, and the requests.
void prepare(const char * what);
void do_call(void);

// bench_generate.c
void do_generate(bool prefill);
void do_append(void);
void do_prefix(void);

// bench_many.c
void do_many(void);

// bench_state.c
void do_keep_state(void);
void do_load_blob(void);
void do_state(void);
void do_file(void);
