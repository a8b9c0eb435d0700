// The plain C side of the benchmarks, directly on llama.h.
//
// One request per line on stdin, one answer per line on stdout, both flat JSON objects; the
// requests are those of benchmarks/peers/worker.py, and are trusted.
#include <time.h>
#include <unistd.h>

#include "bench.h"

struct llama_context *      ctx;
struct llama_batch          batch;
llama_memory_t              mem;
int                         n_vocab, n_seq_max;
uint8_t *                   blob;
size_t                      blob_size;
volatile int64_t            sink;
static struct llama_model * model;
static int                  n_batch;
static char                 request[4096];
static char                 word[1024];

// The libraries are the package's, without its RPC sources.
void * ggml_backend_rpc_reg(void) {
    return 0;
}

double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double) t.tv_sec + 1e-9 * (double) t.tv_nsec;
}

const char * find(const char * key) {
    char quoted[64];
    snprintf(quoted, sizeof quoted, "\"%s\":", key);
    const char * at = strstr(request, quoted);
    if (!at) {
        return NULL;
    }
    at += strlen(quoted);
    return at + strspn(at, " ");
}
long number(const char * key, long otherwise) {
    const char * at = find(key);
    return at ? strtol(at, NULL, 10) : otherwise;
}
const char * text(const char * key) {
    const char * at = find(key);
    word[0] = 0;
    if (at && *at == '"') {
        snprintf(word, sizeof word, "%.*s", (int) strcspn(at + 1, "\""), at + 1);
    }
    return word;
}
static void quiet(enum ggml_log_level level, const char * line, void * unused) {
    (void) unused;
    if (level == GGML_LOG_LEVEL_ERROR) {
        fputs(line, stderr);
    }
}

int token_at(int i) { return 3 + (int) ((long) i * 7919 % (n_vocab - 3)); }

void put(int from, int n, int seq, bool append) {
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
void decode(void) {
    if (llama_decode(ctx, batch) != 0) {
        fprintf(stderr, "llama_decode failed\n");
        exit(1);
    }
    llama_synchronize(ctx);
}
void extend(int seq, int n) {
    int from = llama_memory_seq_pos_max(mem, seq) + 1;
    for (int part; n > 0; from += part, n -= part) {
        part = n < n_batch ? n : n_batch;
        put(from, part, seq, false);
        decode();
    }
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
    p.n_ubatch = (uint32_t) number("n_ubatch", 512);
    p.flash_attn_type = (enum llama_flash_attn_type) number("flash_attn", 1);
    p.type_k = (enum ggml_type) number("type_k", GGML_TYPE_F16);
    p.type_v = (enum ggml_type) number("type_v", GGML_TYPE_F16);
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
    n_batch = (int) llama_n_batch(ctx);
    batch = llama_batch_init(n_batch < 512 ? 512 : n_batch, 0, 1);  // 512 are filled, not decoded
    printf("{\"n_vocab\": %d, \"reported\": {\"n_ctx\": %u, \"n_seq_max\": %u, \"n_batch\": %d, ", n_vocab,
           llama_n_ctx(ctx), llama_n_seq_max(ctx), n_batch);
    printf("\"n_ubatch\": %u, \"threads\": %d}}\n", llama_n_ubatch(ctx), llama_n_threads(ctx));
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
        } else if (is(what, "share")) {
            prepare("remove");
            printf("{}\n");
        } else if (is(what, "call")) {
            do_call();
        } else if (is(what, "decode") || is(what, "prefill")) {
            do_generate(is(what, "prefill"));
        } else if (is(what, "many")) {
            do_many();
        } else if (is(what, "append")) {
            do_append();
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
            printf("{\"error\": \"it has no such call\"}\n");
        }
        fflush(stdout);
    }
    return 0;
}
