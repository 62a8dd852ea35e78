#include "simd_neon.h"
// (the vector operations have to come first)
#include "variant.h"

#include <sys/auxv.h>

const specserve::Kernels * specserve::asimddp() {
    static constexpr Kernels kernels = kernels_named("asimddp");
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0 ? &kernels : nullptr;
}
