// Detects the processor's features and forwards ggml's three entry points to the best copy.
//
// CPUID is read directly because compilers' builtins know different feature names in each version. A feature counts
// only if the system saves its registers.
#include "cpu.h"

#include <cstddef>
#include <cstdint>

#include "cpu_copies.h"  // written by CMake
#include "features.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"

#if defined(__x86_64__) || defined(_M_X64)
#ifdef _MSC_VER
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace pykv {

namespace {

#if defined(__x86_64__) || defined(_M_X64)

enum place { LEAF_1_C, LEAF_AMD_C, LEAF_7_B, LEAF_7_C, LEAF_7_D, LEAF_7_1_A, LEAF_7_1_D, N_PLACES };
// Bits of XCR0: the upper halves of vectors; those, the masks and the wider vectors; tiles.
enum : uint32_t { AVX = 0x6, AVX512 = 0xe6, AMX = 0x60000 };

struct registers {
    uint32_t a = 0, b = 0, c = 0, d = 0;
};

registers cpuid(uint32_t leaf, uint32_t part) {
    registers r;
#ifdef _MSC_VER
    int out[4];
    __cpuid(out, int(leaf & 0x80000000u));
    if (uint32_t(out[0]) >= leaf) {
        __cpuidex(out, int(leaf), int(part));
        r = {uint32_t(out[0]), uint32_t(out[1]), uint32_t(out[2]), uint32_t(out[3])};
    }
#else
    __get_cpuid_count(leaf, part, &r.a, &r.b, &r.c, &r.d);
#endif
    return r;
}

uint64_t saved_registers() {
    constexpr uint32_t OSXSAVE = 1u << 27;
    if (!(cpuid(1, 0).c & OSXSAVE)) {
        return 0;
    }
#ifdef _MSC_VER
    return _xgetbv(0);
#else
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return uint64_t(high) << 32 | low;
#endif
}

bool has(place where, int bit, uint32_t saved) {
    static const struct facts {
        uint32_t bits[N_PLACES];
        uint64_t saved = saved_registers();
        facts() {
            const registers base = cpuid(7, 0), more = base.a >= 1 ? cpuid(7, 1) : registers();
            const uint32_t  all[] = {cpuid(1, 0).c, cpuid(0x80000001u, 0).c, base.b, base.c, base.d, more.a, more.d};
            for (int i = 0; i < N_PLACES; ++i) {
                bits[i] = all[i];
            }
        }
    } facts;
    return (facts.bits[where] >> bit & 1) && (facts.saved & saved) == saved;
}

#elif defined(__aarch64__) && defined(__linux__)

enum place { HWCAP_1 = AT_HWCAP, HWCAP_2 = AT_HWCAP2 };

bool has(place where, int bit, uint32_t) { return getauxval(where) >> bit & 1; }

#elif defined(__aarch64__) && defined(__APPLE__)

bool has(const char * name, int, uint32_t) {
    int    value = 0;
    size_t size = sizeof(value);
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}

#else

bool has(int, int, uint32_t) { return false; }

#endif

using needs_t = const char (*)[PYKV_CPU_TEXT];

struct code {
    const char * name;
    needs_t      needs;
#ifdef PYKV_CPU_COPIES
    decltype(&ggml_backend_cpu_reg)     reg;
    decltype(&ggml_cpu_init)            init;
    decltype(&ggml_get_type_traits_cpu) traits;
#endif
};

}  // namespace

}  // namespace pykv

extern "C" {
#ifdef PYKV_CPU_COPIES
#define DECLARE(name)                                              \
    extern const char         pykv_cpu_needs_##name[][PYKV_CPU_TEXT]; \
    decltype(ggml_backend_cpu_reg)     ggml_backend_cpu_reg_##name;   \
    decltype(ggml_cpu_init)            ggml_cpu_init_##name;          \
    decltype(ggml_get_type_traits_cpu) ggml_get_type_traits_cpu_##name;
PYKV_CPU_COPIES(DECLARE)
#else
extern const char pykv_cpu_needs[][PYKV_CPU_TEXT];
#endif
}

namespace pykv {

namespace {

const code codes[] = {
#ifdef PYKV_CPU_COPIES
#define ENTRY(name) \
    {#name, pykv_cpu_needs_##name, ggml_backend_cpu_reg_##name, ggml_cpu_init_##name, ggml_get_type_traits_cpu_##name},
    PYKV_CPU_COPIES(ENTRY)
#else
    {PYKV_CPU_NAME, pykv_cpu_needs},
#endif
};

const code * used = nullptr;

std::string listed(const std::vector<std::string> & names) {
    constexpr size_t MOST = 8;
    std::string      text;
    for (size_t i = 0; i < names.size() && i < MOST; ++i) {
        text += (i ? ", " : "") + names[i];
    }
    return names.size() > MOST ? text + " and " + std::to_string(names.size() - MOST) + " more" : text;
}

// Features that the code needs and the processor lacks.
std::vector<std::string> lacking(needs_t needs) {
    std::vector<std::string> names;
    size_t                   i = 0;
#define LOOK(name, macro, place, bit, saved)             \
    if (needs[i++][0] == '1' && !has(place, bit, saved)) { \
        names.emplace_back(name);                        \
    }
    PYKV_CPU_FEATURES(LOOK)
    return names;
}

}  // namespace

std::vector<std::string> cpu_names() {
    std::vector<std::string> names;
    for (const code & c : codes) {
        names.emplace_back(c.name);
    }
    return names;
}

std::vector<std::string> cpu_features() {
    std::vector<std::string> names;
#define ASK(name, macro, place, bit, saved) \
    if (has(place, bit, saved)) {           \
        names.emplace_back(name);           \
    }
    PYKV_CPU_FEATURES(ASK)
    return names;
}

std::string cpu_name() { return used ? used->name : ""; }

std::string choose_cpu(const char * wanted) {
    const std::string        name = wanted;
    std::vector<std::string> missing, able;
    const code *             best = nullptr;
    bool                     known = false;
    for (const code & c : codes) {
        const std::vector<std::string> lacks = lacking(c.needs);
        if (lacks.empty()) {
            able.emplace_back(c.name);
        }
        if (name.empty() || name == c.name) {
            known = true;
            missing = lacks;
            if (lacks.empty() && !best) {
                best = &c;
            }
        }
    }
    if (best) {
        used = best;
        return "";
    }
    if (!known) {
        return "PYKVCACHE_CPU is '" + name + "', and this build of pykvcache has " + listed(cpu_names()) +
               (able.size() == cpu_names().size() ? "" : "; this processor can run " + (able.empty() ? "none" : listed(able)));
    }
    const std::string lack = "this processor lacks " + listed(missing);
    if (!able.empty()) {
        return "PYKVCACHE_CPU is '" + name + "', and " + lack + "; it can run " + listed(able);
    }
    return "this build of pykvcache (" + listed(cpu_names()) + ") cannot run here: " + lack +
           ". Build it on this machine (pip install --no-binary pykvcache pykvcache), or take a wheel that runs "
           "on more processors (docs/building.md)";
}

}  // namespace pykv

#ifdef PYKV_CPU_COPIES
extern "C" {
// The entry points of ggml's CPU code.
ggml_backend_reg_t ggml_backend_cpu_reg(void) { return pykv::used->reg(); }
void               ggml_cpu_init(void) { pykv::used->init(); }
const struct ggml_type_traits_cpu * ggml_get_type_traits_cpu(enum ggml_type type) { return pykv::used->traits(type); }
}
#endif
