// In the place of servers.cpp where the build has no RPC of ggml's that is known here.
#include "guarded.h"
#include "servers.h"

namespace pykv {

rpc_server::~rpc_server() = default;

int32_t rpc_open(const char *, int64_t, std::shared_ptr<rpc_server> &, std::string &) noexcept { return RPC_NO_BUILD; }
bool rpc_is_forked() noexcept { return false; }
void rpc_register(const rpc_server &) noexcept {}
rpc_links rpc_links_of(const llama_model *) { return {}; }
std::shared_ptr<llama_model> own_model_on(llama_model * model, const rpc_servers &) { return own_model(model); }
int32_t rpc_serve(const char *, int, const char *, int &) noexcept { return RPC_NO_BUILD; }

// link.cpp is not compiled either.
void rpc_link::hang_up() noexcept {}
std::string rpc_link::why() const { return {}; }

}  // namespace pykv
