#include "simd_neon.h"
// (the vector operations have to come first)
#include "variant.h"

#include <sys/auxv.h>

const specserve::Kernels * specserve::asimd() {
    static constexpr Kernels kernels = kernels_named("asimd");
    return (getauxval(AT_HWCAP) & HWCAP_ASIMD) != 0 ? &kernels : nullptr;
}
