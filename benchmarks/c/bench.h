// Shared by the plain C side: the context, the request, appending tokens.
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
extern uint8_t *              blob;  // the kept state
extern size_t                 blob_size;
extern volatile int64_t       sink;  // takes results, so that calls are not optimised away

double       now(void);
const char * find(const char * key);  // value of a key of the request, or NULL
long         number(const char * key, long otherwise);
const char * text(const char * key);  // valid until the next call
static inline bool is(const char * value, const char * other) { return strcmp(value, other) == 0; }

// Tokens [from, from + n) of a sequence, at the same positions, with logits for the last.
void put(int from, int n, int seq, bool append);
void decode(void);
void extend(int seq, int n);
int  token_at(int i);

// bench_calls.c: contents of the sequences except 0 before a call, and the requests.
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
