/* What ggml's CPU code was allowed to use: compiled with its flags, once for each copy of it.
 *
 * Data alone, so that it can be read on a processor that has none of it. A macro that the compiler defines
 * becomes "1", any other stays its name. */
#include "features.h"

#define TEXT(macro) #macro
#define ROW(name, macro, place, bit, saved) TEXT(macro),

extern const char pykv_cpu_needs[][PYKV_CPU_TEXT];
const char pykv_cpu_needs[][PYKV_CPU_TEXT] = {PYKV_CPU_FEATURES(ROW)};
