// Calls the kernels' library for tests on another machine (emulated.py): calls on stdin, their results on stdout.

#include <cstdint>
#include <cstdio>
#include <vector>

extern "C" {
const char * specserve_use(const char *);
const char * specserve_format(int);
int specserve_max_tile();
double specserve_run_product(int, int, int64_t, int64_t, const uint8_t *, int, int64_t, const float *, const int32_t *, int64_t,
                             int64_t, int64_t, int, int, float *);
int specserve_attend(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, float, const float *, const float *,
                     const float *, const int32_t *, const uint16_t *, const float *, int, int, float *);
double dot_peak(int, const char *);  // of benchmarks/roof.cpp
}

namespace {

enum What : int32_t { kUse, kFormat, kMaxTile, kProduct, kAttend, kDotPeak };

struct Call {
    int32_t what;
    float scale, softcap;
    int64_t n[11];
    int64_t bytes[7];  // of buffers, which follow; the last one's are sent back
};

}  // namespace

int main() {
    Call call;
    while (std::fread(&call, sizeof call, 1, stdin) == 1) {
        std::vector<std::vector<uint8_t>> buffers;
        for (const int64_t bytes : call.bytes) {
            auto & buffer = buffers.emplace_back(static_cast<size_t>(bytes));
            if (std::fread(buffer.data(), 1, buffer.size(), stdin) != buffer.size()) {
                return 1;
            }
        }
        const auto at = [&](size_t i) { return static_cast<void *>(buffers[i].data()); };
        const auto floats = [&](size_t i) { return static_cast<float *>(at(i)); };
        const auto integer = [&](int i) { return static_cast<int>(call.n[i]); };
        const auto say = [&](const char * name) {
            std::snprintf(static_cast<char *>(at(6)), buffers[6].size(), "%s", name == nullptr ? "" : name);
        };
        double result = 0;
        switch (call.what) {
            case kUse: say(specserve_use(static_cast<const char *>(at(0)))); break;
            case kFormat: say(specserve_format(integer(0))); break;
            case kMaxTile: result = specserve_max_tile(); break;
            case kProduct:
                result = specserve_run_product(integer(0), integer(1), call.n[2], call.n[3], buffers[0].data(), integer(4),
                                               call.n[5], floats(1),
                                               buffers[2].empty() ? nullptr : static_cast<const int32_t *>(at(2)),
                                               call.n[6], call.n[7], call.n[8], integer(9), integer(10), floats(6));
                break;
            case kAttend:
                result = specserve_attend(call.n[0], call.n[1], call.n[2], call.n[3], call.n[4], call.n[5], call.scale,
                                          call.softcap, floats(0), floats(1), buffers[2].empty() ? nullptr : floats(2),
                                          static_cast<const int32_t *>(at(3)), static_cast<const uint16_t *>(at(4)),
                                          buffers[5].empty() ? nullptr : floats(5), integer(6), integer(7), floats(6));
                break;
            case kDotPeak: result = dot_peak(1, static_cast<const char *>(at(0))); break;
        }
        std::fwrite(&result, sizeof result, 1, stdout);
        std::fwrite(buffers[6].data(), 1, buffers[6].size(), stdout);
        std::fflush(stdout);
    }
}
