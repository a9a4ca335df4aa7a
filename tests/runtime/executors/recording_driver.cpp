// A libcuda.so.1 that records what it is asked for, a line each on the file LAUNCHES: the calls arrive through the real
// cuda-bindings, as they would at a driver. WIDTHS says how many bytes each parameter of a launched kernel has, which a
// driver would read from the kernel.
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

FILE* out() {
    static FILE* file = std::fopen(std::getenv("LAUNCHES"), "a");
    return file;
}

int load(void** module, const void* image) {
    *module = reinterpret_cast<void*>(0x1000);
    std::fprintf(out(), "load %.4s\n", static_cast<const char*>(image) + 1);
    return std::memcmp(image, "\177ELF", 4) == 0 ? 0 : 209;  // CUDA_ERROR_NO_BINARY_FOR_GPU
}

int get_function(void** function, void* module, const char* name) {
    *function = reinterpret_cast<void*>(0x2000);
    std::fprintf(out(), "function %p %s\n", module, name);
    return std::strcmp(name, "absent") == 0 ? 500 : 0;  // CUDA_ERROR_NOT_FOUND
}

int set_attribute(void* function, int attribute, int value) {
    std::fprintf(out(), "attribute %p %d %d\n", function, attribute, value);
    return 0;
}

void write_parameters(void** parameters) {
    int index = 0;
    for (const char* at = std::getenv("WIDTHS"); at != nullptr && *at != 0; ++index) {
        char* end = nullptr;
        const long width = std::strtol(at, &end, 10);
        std::fprintf(out(), " ");
        for (long i = 0; i < width; ++i)
            std::fprintf(out(), "%02x", static_cast<const unsigned char*>(parameters[index])[i]);
        at = *end == ',' ? end + 1 : end;
    }
    std::fprintf(out(), "\n");
    std::fflush(out());
}

int launch(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
           void* stream, void** parameters, void** extra) {
    std::fprintf(out(), "launch %p %u %u %u %u %u %u %u %p %p", function, gx, gy, gz, bx, by, bz, shared, stream,
                 static_cast<void*>(extra));
    write_parameters(parameters);
    return gx == 0 ? 1 : 0;  // CUDA_ERROR_INVALID_VALUE
}

// CUlaunchConfig, and CUlaunchAttribute with its value of 64 bytes at a multiple of eight.
struct Attribute {
    int id;
    char gap[4];
    int value[16];
};
struct Configuration {
    unsigned grid[3], block[3], shared;
    void* stream;
    const Attribute* attributes;
    unsigned count;
};

int launch_with_attributes(const Configuration* given, void* function, void** parameters, void** extra) {
    std::fprintf(out(), "launch %p", function);
    for (unsigned size : given->grid) std::fprintf(out(), " %u", size);
    for (unsigned size : given->block) std::fprintf(out(), " %u", size);
    std::fprintf(out(), " %u %p %p", given->shared, given->stream, static_cast<void*>(extra));
    for (unsigned i = 0; i < given->count; ++i)
        std::fprintf(out(), " %d=%d", given->attributes[i].id, given->attributes[i].value[0]);
    write_parameters(parameters);
    return given->grid[0] == 0 ? 1 : 0;  // CUDA_ERROR_INVALID_VALUE
}

}  // namespace

extern "C" int cuGetProcAddress_v2(const char* name, void** function, int, unsigned long long, void*) {
    *function = nullptr;
    if (std::strcmp(name, "cuModuleLoadData") == 0) *function = reinterpret_cast<void*>(load);
    if (std::strcmp(name, "cuModuleGetFunction") == 0) *function = reinterpret_cast<void*>(get_function);
    if (std::strcmp(name, "cuFuncSetAttribute") == 0) *function = reinterpret_cast<void*>(set_attribute);
    if (std::strcmp(name, "cuLaunchKernel") == 0) *function = reinterpret_cast<void*>(launch);
    if (std::strcmp(name, "cuLaunchKernelEx") == 0) *function = reinterpret_cast<void*>(launch_with_attributes);
    return *function == nullptr ? 500 : 0;
}
