// llama.cpp's own state files, by its own functions: what tests/state/test_llama_peer.py compares with.
// usage: peer save|load MODEL FILE SEQ(-1: context) STREAMS SWA_FULL N_CTX N_UBATCH OUT TOKEN...
#include "ggml-backend.h"
#include "llama.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

// ggml's registry asks for its RPC, which in this build needs the package's transport.
extern "C" ggml_backend_reg_t ggml_backend_rpc_reg(void) { return nullptr; }

static void quiet(ggml_log_level level, const char * text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

static bool decode(llama_context * ctx, llama_seq_id seq, llama_pos at, const std::vector<llama_token> & tokens) {
    // M-RoPE takes four positions for each token, of which text has three equal ones.
    const bool several = llama_model_rope_type(llama_get_model(ctx)) == LLAMA_ROPE_TYPE_MROPE;
    llama_batch batch = llama_batch_init((int32_t) tokens.size(), 0, 1);
    const int32_t n = (int32_t) tokens.size();
    std::vector<llama_pos> pos(4 * n, 0);
    for (int32_t i = 0; i < n; i++) {
        batch.token[i] = tokens[i];
        pos[i] = pos[n + i] = pos[2 * n + i] = at + i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = seq;
        batch.logits[i] = i + 1 == n;
    }
    llama_pos * own = batch.pos;
    if (several) {
        batch.pos = pos.data();
    } else {
        memcpy(own, pos.data(), n * sizeof(llama_pos));
    }
    batch.n_tokens = n;
    const bool done = llama_decode(ctx, batch) == 0;
    batch.pos = own;
    llama_batch_free(batch);
    return done;
}

int main(int argc, char ** argv) {
    if (argc < 11) {
        return 2;
    }
    llama_log_set(quiet, nullptr);
    const bool save = strcmp(argv[1], "save") == 0;
    const llama_seq_id seq = atoi(argv[4]);
    const llama_seq_id used = seq < 0 ? 1 : seq;
    std::vector<llama_token> tokens;
    for (int i = 10; i < argc; i++) {
        tokens.push_back(atoi(argv[i]));
    }
    llama_model_params mparams = llama_model_default_params();
    llama_model * model = llama_model_load_from_file(argv[2], mparams);
    llama_context_params params = llama_context_default_params();
    params.n_ctx = atoi(argv[7]);
    params.n_ubatch = atoi(argv[8]);
    params.n_seq_max = 4;
    params.n_threads = params.n_threads_batch = 1;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.kv_unified = atoi(argv[5]) == 0;
    params.swa_full = atoi(argv[6]) != 0;
    params.type_k = params.type_v = GGML_TYPE_F32;
    llama_context * ctx = model ? llama_init_from_model(model, params) : nullptr;
    if (!ctx) {
        return 3;
    }
    if (save) {
        if (!decode(ctx, used, 0, tokens)) {
            return 4;
        }
        const bool done = seq < 0 ? llama_state_save_file(ctx, argv[3], tokens.data(), tokens.size())
                                  : llama_state_seq_save_file(ctx, argv[3], seq, tokens.data(), tokens.size()) != 0;
        if (!done) {
            return 5;
        }
    } else {
        std::vector<llama_token> found(4096);
        size_t n = 0;
        const bool done = seq < 0 ? llama_state_load_file(ctx, argv[3], found.data(), found.size(), &n)
                                  : llama_state_seq_load_file(ctx, argv[3], seq, found.data(), found.size(), &n) != 0;
        if (!done || n != tokens.size() || memcmp(found.data(), tokens.data(), n * sizeof(llama_token)) != 0) {
            return 6;
        }
    }
    if (!decode(ctx, used, (llama_pos) tokens.size(), {9})) {
        return 7;
    }
    FILE * out = fopen(argv[9], "wb");
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    fwrite(llama_get_logits_ith(ctx, -1), sizeof(float), n_vocab, out);
    fclose(out);
    llama_free(ctx);
    llama_model_free(model);
    return 0;
}
