// Stubs for builds without ggml's RPC, or with another version of it.
#include "guarded.h"
#include "servers.h"

namespace pykv {

rpc_server::~rpc_server() = default;
void rpc_link::close() {}

int32_t rpc_open(const char *, int64_t, std::shared_ptr<rpc_server> &, std::string &) noexcept { return RPC_NO_BUILD; }
void rpc_register(const rpc_server &) noexcept {}
std::shared_ptr<llama_model> own_model_on(llama_model * model, const std::vector<std::shared_ptr<rpc_server>> &) {
    return std::shared_ptr<llama_model>(model, [](llama_model * last) { model_free(last); });
}
device_links rpc_links_of(const llama_model *) { return {}; }
int32_t rpc_serve(const char *, int, const char *) noexcept { return RPC_NO_BUILD; }

}  // namespace pykv
