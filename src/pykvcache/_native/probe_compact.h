// Moving cells down, so that a decode looks at no more of the cache than is used. Called by state.pxi.
#pragma once

#include "probe.h"

namespace pykv {

// Whether every cache of the memory could have its cells moved: their order has to mean nothing.
bool can_compact(const memory * m);

}  // namespace pykv
