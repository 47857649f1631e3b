// A stand-in for libnvonnxparser.so.11: forwards to the parser of TensorRT-RTX, with the proxy around the network removed.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>

extern "C" void* shim11_unwrap_network(void* network);

namespace {

[[noreturn]] void die(char const* what) {
    std::fprintf(stderr, "shim11: %s\n", what);
    std::abort();
}

template <class Function>
Function symbol(char const* name) {
    static void* const handle = [] {
        char const* library = std::getenv("SHIM11_RTX_LIBRARY");
        char const* parser = std::getenv("SHIM11_RTX_PARSER");
        if (library == nullptr || parser == nullptr) die("SHIM11_RTX_LIBRARY or SHIM11_RTX_PARSER is not set");
        dlopen(library, RTLD_NOW | RTLD_GLOBAL);  // the parser resolves its symbols from there
        void* opened = dlopen(parser, RTLD_NOW | RTLD_GLOBAL);
        if (opened == nullptr) die(dlerror());
        return opened;
    }();
    void* found = dlsym(handle, name);
    if (found == nullptr) die(name);
    return reinterpret_cast<Function>(found);
}

}  // namespace

extern "C" {

int32_t getNvOnnxParserVersion() { return symbol<int32_t (*)()>("getNvOnnxParserVersion")(); }

void* createNvOnnxParser_INTERNAL(void* network, void* logger, int32_t) {
    auto create = symbol<void* (*)(void*, void*, int32_t)>("createNvOnnxParser_INTERNAL");
    return create(shim11_unwrap_network(network), logger, getNvOnnxParserVersion());
}

void* createNvOnnxParserRefitter_INTERNAL(void* refitter, void* logger, int32_t) {
    auto create = symbol<void* (*)(void*, void*, int32_t)>("createNvOnnxParserRefitter_INTERNAL");
    return create(refitter, logger, getNvOnnxParserVersion());
}
}
