// The plain C side of the benchmarks: llama.h and nothing between.
//
// One request per line on stdin, one answer per line on stdout, both flat JSON objects; the
// requests are those of benchmarks/peers/worker.py. Whatever a request holds is trusted.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "llama.h"

static struct llama_model *   model;
static struct llama_context * ctx;
static struct llama_batch     batch;
static llama_memory_t         mem;
static int                    n_vocab, n_batch, n_seq_max;
static uint8_t *              blob;
static size_t                 blob_size;
static char                   request[4096];
static char                   word[1024];
static volatile int64_t       sink;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double) t.tv_sec + 1e-9 * (double) t.tv_nsec;
}

static const char * find(const char * key) {
    char quoted[64];
    snprintf(quoted, sizeof quoted, "\"%s\":", key);
    const char * at = strstr(request, quoted);
    if (!at) {
        return NULL;
    }
    at += strlen(quoted);
    return at + strspn(at, " ");
}
static long number(const char * key, long otherwise) {
    const char * at = find(key);
    return at ? strtol(at, NULL, 10) : otherwise;
}
static const char * text(const char * key) {
    const char * at = find(key);
    word[0] = 0;
    if (at && *at == '"') {
        snprintf(word, sizeof word, "%.*s", (int) strcspn(at + 1, "\""), at + 1);
    }
    return word;
}
static bool is(const char * value, const char * other) { return strcmp(value, other) == 0; }

static void quiet(enum ggml_log_level level, const char * line, void * unused) {
    (void) unused;
    if (level == GGML_LOG_LEVEL_ERROR) {
        fputs(line, stderr);
    }
}

static int token_at(int i) { return 3 + (int) ((long) i * 7919 % (n_vocab - 3)); }

// The tokens [from, from + n) of a sequence, at the same positions, with logits for the last.
static void put(int from, int n, int seq, bool append) {
    int at = append ? batch.n_tokens : 0;
    for (int i = 0; i < n; ++i, ++at) {
        batch.token[at] = token_at(from + i);
        batch.pos[at] = from + i;
        batch.n_seq_id[at] = 1;
        batch.seq_id[at][0] = seq;
        batch.logits[at] = i == n - 1;
    }
    batch.n_tokens = at;
}
static void fill(const int * tokens, int n) {
    for (int i = 0; i < n; ++i) {
        batch.token[i] = tokens[i];
        batch.pos[i] = i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = i == n - 1;
    }
    batch.n_tokens = n;
    __asm__ volatile("" ::: "memory");
}
static void decode(void) {
    if (llama_decode(ctx, batch) != 0) {
        fprintf(stderr, "llama_decode failed\n");
        exit(1);
    }
    llama_synchronize(ctx);
}
static void extend(int seq, int n) {
    int from = llama_memory_seq_pos_max(mem, seq) + 1;
    for (int part; n > 0; from += part, n -= part) {
        part = n < n_batch ? n : n_batch;
        put(from, part, seq, false);
        decode();
    }
}
// What a greedy sampler does: it reads every logit once.
static int first_token(void) {
    const float * row = llama_get_logits_ith(ctx, -1);
    int best = 0;
    for (int i = 1; i < n_vocab; ++i) {
        if (row[i] > row[best]) {
            best = i;
        }
    }
    return best;
}

static void do_open(void) {
    if (ctx) {
        llama_free(ctx);
        llama_batch_free(batch);
        ctx = NULL;
    }
    if (find("model")) {
        if (model) {
            llama_model_free(model);
        }
        model = llama_model_load_from_file(text("model"), llama_model_default_params());
    }
    struct llama_context_params p = llama_context_default_params();
    p.n_ctx = (uint32_t) number("n_ctx", 512);
    p.n_seq_max = (uint32_t) number("n_seq_max", 1);
    p.n_batch = (uint32_t) number("n_batch", 512);
    p.n_ubatch = p.n_batch < 512 ? p.n_batch : 512;
    p.n_threads = p.n_threads_batch = (int) number("threads", 1);
    p.kv_unified = true;
    p.swa_full = true;
    ctx = model ? llama_init_from_model(model, p) : NULL;
    if (!ctx) {
        printf("{\"error\": \"llama.cpp cannot open that\"}\n");
        return;
    }
    mem = llama_get_memory(ctx);
    n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    n_seq_max = (int) p.n_seq_max;
    n_batch = (int) p.n_batch;
    batch = llama_batch_init(n_batch, 0, 1);
    printf("{\"n_vocab\": %d}\n", n_vocab);
}

// Every sequence but 0 is emptied, filled with four tokens of its own, or made a copy of 0.
static void prepare(const char * what) {
    for (int s = 1; s < n_seq_max; ++s) {
        llama_memory_seq_rm(mem, s, -1, -1);
    }
    if (is(what, "remove") || is(what, "remove_part") || is(what, "copy_over")) {
        for (int s = 1; s < n_seq_max; ++s) {
            llama_memory_seq_cp(mem, 0, s, -1, -1);
        }
    } else if (is(what, "add") || is(what, "div")) {
        batch.n_tokens = 0;
        for (int s = 1; s < n_seq_max; ++s) {
            put(64, 1, s, true);
        }
        decode();
    }
}

// The sequences but 0 in another order each time: a processor learns a short pass by heart.
static int * shuffled(void) {
    static int order[256];
    for (int i = 1; i < n_seq_max; ++i) {
        int other = 1 + rand() % i;
        order[i] = order[other];
        order[other] = i;
    }
    return order;
}

// Seconds of one pass over all sequences but 0; the passes of one call are `calls` calls.
static double pass(const char * what, int * calls, const float ** row) {
    static int  tokens[512];  // zeros: what is copied does not matter
    static float copy[1 << 18];
    const int   n = n_seq_max;
    const int   last = llama_memory_seq_pos_max(mem, 0);
    int64_t     sum = 0;
    double      t;
    *calls = n - 1;
    if (is(what, "decode1")) {
        *calls = 16;
        t = now();
        for (int i = 1; i <= 16; ++i) {
            put(last + i, 1, 0, false);
            decode();
        }
        t = now() - t;
        llama_memory_seq_rm(mem, 0, last + 1, -1);
        return t;
    }
    if (is(what, "batch1") || is(what, "batch512")) {
        const int size = is(what, "batch1") ? 1 : 512;
        t = now();
        for (int s = 1; s < n; ++s) {
            fill(tokens, size);
        }
        return now() - t;
    }
    t = 1e18;  // for a call that is not known
    prepare(what);
    const int * order = shuffled();
#define EACH(name, call)                                                                           \
    if (is(what, name)) {                                                                          \
        t = now();                                                                                 \
        for (int i = 1; i < n; ++i) {                                                              \
            const int s = order[i];                                                                \
            (void) s;                                                                              \
            call;                                                                                  \
        }                                                                                          \
        t = now() - t;                                                                             \
    }
    EACH("pos_max", sum += llama_memory_seq_pos_max(mem, 0))
    EACH("pos_min", sum += llama_memory_seq_pos_min(mem, 0))
    EACH("can_shift", sum += llama_memory_can_shift(mem))
    EACH("copy", llama_memory_seq_cp(mem, 0, s, -1, -1))
    EACH("copy_part", llama_memory_seq_cp(mem, 0, s, 0, 8))
    EACH("copy_over", llama_memory_seq_rm(mem, s, -1, -1); llama_memory_seq_cp(mem, 0, s, -1, -1))
    EACH("remove", llama_memory_seq_rm(mem, s, -1, -1))
    EACH("remove_part", llama_memory_seq_rm(mem, s, 8, 16))
    EACH("keep", llama_memory_seq_keep(mem, 0))
    EACH("add", llama_memory_seq_add(mem, s, -1, -1, 1))
    EACH("div", llama_memory_seq_div(mem, s, -1, -1, 2))
    EACH("logits", *row = llama_get_logits_ith(ctx, -1); memcpy(copy, *row, (size_t) n_vocab * sizeof(float)))
    sink += sum + (int64_t) copy[5];
    return t;
}

static void do_call(void) {
    char         what[64];
    int          calls = 1;
    const float * row = NULL;
    double       best = 1e9;
    snprintf(what, sizeof what, "%s", text("what"));
    const double begin = now();
    const long   slices = number("slices", 20);
    for (long i = 0; i < slices && (i < 5 || now() - begin < 0.06); ++i) {
        double t = pass(what, &calls, &row) / calls;
        best = t < best ? t : best;
    }
    prepare("nothing");
    printf(best < 1.0 ? "{\"seconds\": %.12g}\n" : "{\"error\": \"not there\"}\n", best);
}

// `steps` decodes of one token for each of n sequences, or one prompt cut among n sequences.
static void do_generate(bool prefill) {
    int n = (int) number("parallel", 1), steps = (int) number("steps", 16), from = (int) number("depth", 32);
    int each = (int) number("tokens", 512) / n;
    llama_memory_clear(mem, false);
    if (!prefill) {
        for (int s = 0; s < n; ++s) {
            extend(s, from);
        }
    }
    double t = now();
    if (prefill) {
        batch.n_tokens = 0;
        for (int s = 0; s < n; ++s) {
            put(0, each, s, true);
        }
        decode();
    }
    t = now() - t;
    for (int i = 0; i < steps && !prefill; ++i) {
        double step = now();
        batch.n_tokens = 0;
        for (int s = 0; s < n; ++s) {
            put(from + i, 1, s, true);
        }
        decode();
        step = now() - step;
        t = i == 0 || step < t ? step : t;
    }
    printf("{\"seconds\": %.9f, \"tokens\": %d}\n", t, prefill ? each * n : n);
}

// Seconds until sequence 1 holds the prefix, and until the first token after its own tail.
static void do_prefix(void) {
    char   how[32];
    int    n = (int) number("n", 256), tail = (int) number("tail", 16), evaluated = tail;
    size_t count = 0;
    snprintf(how, sizeof how, "%s", text("how"));
    text("path");
    llama_memory_seq_rm(mem, 1, -1, -1);
    double t = now();
    if (is(how, "cold")) {
        extend(1, n);
        evaluated += n;
    } else if (is(how, "fork")) {
        llama_memory_seq_cp(mem, 0, 1, -1, -1);
    } else if (is(how, "memory")) {
        count = llama_state_seq_set_data(ctx, blob, blob_size, 1);
    } else {
        llama_token * tokens = malloc((size_t) n * sizeof(llama_token));
        size_t        got = 0;
        count = llama_state_seq_load_file(ctx, word, 1, tokens, (size_t) n, &got);
        free(tokens);
    }
    double ready = now() - t;
    extend(1, tail);
    sink += first_token();
    printf("{\"ready\": %.9f, \"first\": %.9f, \"evaluated\": %d, \"bytes\": %zu}\n", ready, now() - t, evaluated, count);
    llama_memory_seq_rm(mem, 1, -1, -1);
}

// The state of sequence 0: kept here, and written as llama.cpp's own file.
static void do_keep_state(void) {
    llama_token * tokens;
    int           n = (int) number("n", 0);
    blob_size = llama_state_seq_get_size(ctx, 0);
    blob = realloc(blob, blob_size);
    blob_size = llama_state_seq_get_data(ctx, blob, blob_size, 0);
    tokens = malloc(((size_t) n + 1) * sizeof(llama_token));
    for (int i = 0; i < n; ++i) {
        tokens[i] = token_at(i);
    }
    if (find("path")) {
        llama_state_seq_save_file(ctx, text("path"), 0, tokens, (size_t) n);
    }
    free(tokens);
    printf("{\"bytes\": %zu}\n", blob_size);
}

// Read a raw sequence state from a file into sequence 0, and keep it for "state".
static void do_load_blob(void) {
    FILE * file = fopen(text("path"), "rb");
    fseek(file, 0, SEEK_END);
    blob_size = (size_t) ftell(file);
    rewind(file);
    blob = realloc(blob, blob_size);
    size_t got = fread(blob, 1, blob_size, file);
    fclose(file);
    llama_memory_clear(mem, false);
    got = got == blob_size ? llama_state_seq_set_data(ctx, blob, blob_size, 0) : 0;
    printf("{\"bytes\": %zu}\n", got);
}

static void do_state(void) {
    char      what[32];
    uint8_t * out = malloc(blob_size);
    double    best = 1e9;
    snprintf(what, sizeof what, "%s", text("what"));
    const bool copies = is(what, "memcpy"), saves = is(what, "save");
    memset(out, 1, blob_size);
    if (strstr(what, "_new")) {
        printf("{\"error\": \"not there: state %s\"}\n", what);
        free(out);
        return;
    }
    for (long i = number("slices", 5); i > 0; --i) {
        if (is(what, "load")) {
            llama_memory_seq_rm(mem, 0, -1, -1);
        }
        double t = now();
        if (copies) {
            memcpy(out, blob, blob_size);
            __asm__ volatile("" ::"r"(out) : "memory");
        } else if (saves) {
            sink += (int64_t) llama_state_seq_get_data(ctx, out, blob_size, 0);
        } else {
            sink += (int64_t) llama_state_seq_set_data(ctx, blob, blob_size, 0);
        }
        t = now() - t;
        best = t < best ? t : best;
    }
    free(out);
    printf("{\"seconds\": %.9f, \"bytes\": %zu}\n", best, blob_size);
}

static int ascending(const void * a, const void * b) {
    const double x = *(const double *) a, y = *(const double *) b;
    return (x > y) - (x < y);
}

// The least that any save takes: as many bytes, already there, into a new file.
static void plain_write(const char * path) {
    const int file = open(path, O_WRONLY | O_CREAT | O_EXCL, 0666);
    size_t    done = 0;
    while (file >= 0 && done < blob_size) {
        const ssize_t some = write(file, blob + done, blob_size - done);
        if (some <= 0) {
            break;
        }
        done += (size_t) some;
    }
    sink += (int64_t) done;
    if (file >= 0) {
        close(file);
    }
}

// llama.cpp's own files: one that is there is written over, or it is made; the median, because how
// long the system takes depends on what it still has to write.
static void do_file(void) {
    char   what[32];
    int    n = (int) number("n", 0), slices = (int) number("slices", 5);
    size_t got = 0;
    snprintf(what, sizeof what, "%s", text("what"));
    const bool    loads = is(what, "file_load"), writes = is(what, "file_write");
    const bool    makes = writes || is(what, "file_make");
    llama_token * tokens = calloc((size_t) n + 1, sizeof(llama_token));
    double *      times = malloc((size_t) slices * sizeof(double));
    const char *  path = text("path");
    for (int i = -1; i < slices; ++i) {  // the first is not counted
        if (loads) {
            llama_memory_seq_rm(mem, 0, -1, -1);
        } else if (makes) {
            unlink(path);
        }
        double t = now();
        if (loads) {
            sink += (int64_t) llama_state_seq_load_file(ctx, path, 0, tokens, (size_t) n, &got);
        } else if (writes) {
            plain_write(path);
        } else {
            sink += (int64_t) llama_state_seq_save_file(ctx, path, 0, tokens, (size_t) n);
        }
        times[i < 0 ? 0 : i] = now() - t;
    }
    qsort(times, (size_t) slices, sizeof(double), ascending);
    printf("{\"seconds\": %.9f}\n", times[slices / 2]);
    free(tokens);
    free(times);
}

static void do_rss(void) {
    long   pages = 0, resident = 0;
    FILE * file = fopen("/proc/self/statm", "r");
    resident = file && fscanf(file, "%ld %ld", &pages, &resident) == 2 ? resident : 0;
    fclose(file);
    printf("{\"bytes\": %ld}\n", resident * sysconf(_SC_PAGESIZE));
}

int main(void) {
    llama_log_set(quiet, NULL);
    llama_backend_init();
    while (fgets(request, sizeof request, stdin)) {
        char what[32];
        snprintf(what, sizeof what, "%s", text("do"));
        if (is(what, "open")) {
            do_open();
        } else if (is(what, "fill")) {
            llama_memory_clear(mem, false);
            extend(0, (int) number("n", 16));
            printf("{}\n");
        } else if (is(what, "call")) {
            do_call();
        } else if (is(what, "decode") || is(what, "prefill")) {
            do_generate(is(what, "prefill"));
        } else if (is(what, "prefix")) {
            do_prefix();
        } else if (is(what, "keep_state")) {
            do_keep_state();
        } else if (is(what, "load_blob")) {
            do_load_blob();
        } else if (is(what, "state")) {
            do_state();
        } else if (is(what, "file")) {
            do_file();
        } else if (is(what, "rss")) {
            do_rss();
        } else if (is(what, "facts")) {
            printf("{\"binding\": \"llama.h\", \"system\": \"%s\"}\n", llama_print_system_info());
        } else {
            printf("{\"error\": \"not there: %s\"}\n", what);
        }
        fflush(stdout);
    }
    return 0;
}
