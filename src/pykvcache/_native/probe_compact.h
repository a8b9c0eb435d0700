// Moving cells down, so that a decode looks at no more of the cache than is used. Called by state.pxi.
#pragma once

#include "probe.h"

namespace pykv {

// Whether every cache of the memory could have its cells moved: their order has to mean nothing.
bool can_compact(const memory * m);
// Move the cells of every stream to its lowest cells, data and all; the number of cells that moved,
// or CAUGHT. Nothing may be pending. The search for free cells goes on above them.
int64_t compact(memory * m, uint32_t n_seq_max) noexcept;

}  // namespace pykv
