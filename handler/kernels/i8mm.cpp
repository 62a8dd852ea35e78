#include "simd_neon.h"
// (the vector operations have to come first)
#include "variant.h"

#include <sys/auxv.h>

const specserve::Kernels * specserve::i8mm() {
    static constexpr Kernels kernels = kernels_named("i8mm");
    const bool has = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0 && (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
    return has ? &kernels : nullptr;
}
