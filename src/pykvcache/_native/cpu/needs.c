/* Features that a copy of ggml's CPU code may use; compiled with that copy's flags.
 *
 * Only data, so that any processor can read it. A macro that the compiler defines becomes "1", any other stays its
  * name. */
#include "features.h"

#define TEXT(macro) #macro
#define ROW(name, macro, place, bit, saved) TEXT(macro),

extern const char pykv_cpu_needs[][PYKV_CPU_TEXT];
const char pykv_cpu_needs[][PYKV_CPU_TEXT] = {PYKV_CPU_FEATURES(ROW)};
