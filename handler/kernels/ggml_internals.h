// What this library asks of ggml beyond its public headers.
//
// These are declarations of things that live in llama-cpp-python's libggml-base.so and libggml-cpu.so: the table of
// functions behind a buffer type, and the two abstract classes through which the CPU backend asks a buffer type for
// kernels of its own. They are internals, and any version may change them: a library that was compiled with others
// would call wrong functions. Therefore
// - kVerified lists the versions whose sources declare the same; nothing is built for another one (CMakeLists.txt).
//   tests/engine/test_ggml_internals.py compares these declarations with the sources of each of them.
// - engine/kernel_library.py reads from the library's file for which version it was built before it loads it, and first
//   runs it in a process of its own.

#pragma once

#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>

#include <string_view>
#include <vector>

// scripts/try_upgrade says when to add a version. CMakeLists.txt reads this line.
constexpr std::string_view kVerified[] = {"0.3.35", "0.3.36"};

extern "C" {

struct ggml_backend_buffer_type_i {
    const char * (*get_name)(ggml_backend_buffer_type_t);
    ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t, size_t size);
    size_t (*get_alignment)(ggml_backend_buffer_type_t);
    size_t (*get_max_size)(ggml_backend_buffer_type_t);
    size_t (*get_alloc_size)(ggml_backend_buffer_type_t, const ggml_tensor *);
    bool (*is_host)(ggml_backend_buffer_type_t);
};

struct ggml_backend_buffer_type {
    ggml_backend_buffer_type_i iface;
    ggml_backend_dev_t device;
    void * context;
};

struct ggml_backend_buffer_i {
    void (*free_buffer)(ggml_backend_buffer_t);
    void * (*get_base)(ggml_backend_buffer_t);
    ggml_status (*init_tensor)(ggml_backend_buffer_t, ggml_tensor *);
    void (*memset_tensor)(ggml_backend_buffer_t, ggml_tensor *, uint8_t, size_t offset, size_t size);
    void (*set_tensor)(ggml_backend_buffer_t, ggml_tensor *, const void *, size_t offset, size_t size);
    void (*get_tensor)(ggml_backend_buffer_t, const ggml_tensor *, void *, size_t offset, size_t size);
    void (*set_tensor_2d)(ggml_backend_buffer_t, ggml_tensor *, const void *, size_t, size_t, size_t, size_t, size_t);
    void (*get_tensor_2d)(ggml_backend_buffer_t, const ggml_tensor *, void *, size_t, size_t, size_t, size_t, size_t);
    bool (*cpy_tensor)(ggml_backend_buffer_t, const ggml_tensor *, ggml_tensor *);
    void (*clear)(ggml_backend_buffer_t, uint8_t);
    void (*reset)(ggml_backend_buffer_t);
};

struct ggml_backend_buffer {
    ggml_backend_buffer_i iface;
    ggml_backend_buffer_type_t buft;
    void * context;
    size_t size;
    ggml_backend_buffer_usage usage;
};

ggml_backend_buffer_t ggml_backend_buffer_init(ggml_backend_buffer_type_t, ggml_backend_buffer_i, void * context,
                                               size_t size);

// One thread's share of one operation of a graph.
struct ggml_compute_params {
    int ith, nth;  // this thread, of how many
    size_t wsize;  // bytes of scratch memory, shared by all threads
    void * wdata;
    ggml_threadpool * threadpool;
    bool use_ref;
};

void ggml_barrier(ggml_threadpool *);
}

namespace ggml::cpu {

class tensor_traits {
  public:
    virtual ~tensor_traits();
    virtual bool work_size(int n_threads, const ggml_tensor * op, size_t & size) = 0;
    virtual bool compute_forward(ggml_compute_params * params, ggml_tensor * op) = 0;
};

class extra_buffer_type {
  public:
    virtual ~extra_buffer_type();
    virtual bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) = 0;
    virtual tensor_traits * get_tensor_traits(const ggml_tensor * op) = 0;
};

}  // namespace ggml::cpu

// The CPU backend's own list: what stands first is asked first, for every weight and for every operation.
std::vector<ggml_backend_buffer_type_t> & ggml_backend_cpu_get_extra_buffer_types();
