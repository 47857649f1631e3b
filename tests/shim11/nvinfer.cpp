// A stand-in for libnvinfer.so.11 that lets the classic 11.x Python bindings build over the TensorRT-RTX library.
//
// Both libraries grew from the same sources, so almost every virtual table has the same layout. Where they differ the
// bindings would call the wrong function, so three kinds of object are replaced by proxies with the classic layout:
//
//   builder   classic has buildEngineWithConfig, RTX does not
//   network   classic has addPluginV2 and addPluginV3 (slots 25, 26), RTX does not: later slots move down by two
//   tensor    classic has four broadcast and location slots (7 to 10), RTX does not: later slots move down by four
//
// Objects of this API are two words: a virtual table used for destruction only, and a pointer to an implementation
// object whose own table carries the methods. Slot numbers below count methods of the latter, after its destructors.
// All other objects (config, profile, runtime, timing cache, host memory) are handed through as they are.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <memory>

namespace {

constexpr int kFirstMethod = 2;  // a table starts with the two destructors of the Itanium C++ ABI
constexpr int kNetworkSlots = 100, kTensorSlots = 20;
constexpr int kGetInput = 13, kGetOutput = 15;  // network slots that return tensors
constexpr int kReportedVersion = 110400;        // what the 11.4 bindings ask for

[[noreturn]] void die(char const* what) {
    std::fprintf(stderr, "shim11: %s\n", what);
    std::abort();
}

void* rtx() {
    static void* const handle = [] {
        char const* path = std::getenv("SHIM11_RTX_LIBRARY");
        if (path == nullptr) die("SHIM11_RTX_LIBRARY is not set; use tests.shim11.shim_environment");
        void* opened = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
        if (opened == nullptr) die(dlerror());
        return opened;
    }();
    return handle;
}

template <class Function>
Function symbol(char const* name) {
    void* found = dlsym(rtx(), name);
    if (found == nullptr) die(name);
    return reinterpret_cast<Function>(found);
}

// What the bindings hold. The destructor is virtual, so the first word is a table, as they expect.
struct Handle {
    virtual ~Handle() = default;
    void* impl = nullptr;
};

void* implOf(void* handle) { return static_cast<Handle*>(handle)->impl; }

template <class Result, class... Args>
Result call(void* impl, int slot, Args... args) {
    void** table = *static_cast<void***>(impl);
    return reinterpret_cast<Result (*)(void*, Args...)>(table[kFirstMethod + slot])(impl, args...);
}

void destroy(void* handle) {
    // The second entry is the deleting destructor.
    reinterpret_cast<void (*)(void*)>((*static_cast<void***>(handle))[1])(handle);
}

// An implementation object with a table of our own. The jump thunks (thunks.py) load `real` from offset 8 and go on
// through its table, so the order of the two fields is fixed.
struct Redirect {
    void** table;
    void* real;
};
static_assert(offsetof(Redirect, real) == 8, "the thunks rely on this offset");

}  // namespace

extern "C" void* shim11_network_table[kFirstMethod + kNetworkSlots];
extern "C" void* shim11_tensor_table[kFirstMethod + kTensorSlots];

namespace {

struct Tensor : Handle {
    Redirect redirect;
    explicit Tensor(void* real) : redirect{shim11_tensor_table, implOf(real)} { impl = &redirect; }
};

struct Network;
struct NetworkRedirect : Redirect {
    Network* owner;  // lets the two overridden slots find their proxy from the implementation pointer
};

struct Network : Handle {
    NetworkRedirect redirect;
    void* real;
    void* table[kFirstMethod + kNetworkSlots];
    std::map<void*, std::unique_ptr<Tensor>> tensors;  // one proxy per tensor, so that identity is stable

    explicit Network(void* network) : real(network) {
        std::memcpy(table, shim11_network_table, sizeof table);
        table[kFirstMethod + kGetInput] = reinterpret_cast<void*>(&Network::getTensor<kGetInput>);
        table[kFirstMethod + kGetOutput] = reinterpret_cast<void*>(&Network::getTensor<kGetOutput>);
        redirect.table = table;
        redirect.real = implOf(network);
        redirect.owner = this;
        impl = &redirect;
    }
    ~Network() override {
        tensors.clear();
        destroy(real);
    }

    template <int slot>
    static void* getTensor(void* self, int32_t index) {
        Network* owner = static_cast<NetworkRedirect*>(self)->owner;
        void* tensor = call<void*>(owner->redirect.real, slot, index);
        if (tensor == nullptr) return nullptr;
        auto& proxy = owner->tensors[tensor];
        if (!proxy) proxy = std::make_unique<Tensor>(tensor);
        return static_cast<Handle*>(proxy.get());
    }
};

void* unwrap(void* network) {
    return network == nullptr ? nullptr : static_cast<Network*>(static_cast<Handle*>(network))->real;
}

// The classic builder table, in order. Methods that this project never calls go through unnamed.
struct BuilderImpl {
    void* real;
    explicit BuilderImpl(void* impl) : real(impl) {}
    virtual ~BuilderImpl() = default;
    virtual int32_t maxDlaBatchSize() { return call<int32_t>(real, 0); }
    virtual int32_t dlaCores() { return call<int32_t>(real, 1); }
    virtual void setGpuAllocator(void* allocator) { call<void>(real, 2, allocator); }
    virtual void* createBuilderConfig() { return call<void*>(real, 3); }
    virtual void* createNetwork(uint32_t flags) {
        void* network = call<void*>(real, 4, flags);
        return network == nullptr ? nullptr : static_cast<Handle*>(new Network(network));
    }
    virtual void* createOptimizationProfile() { return call<void*>(real, 5); }
    virtual void setErrorRecorder(void* recorder) { call<void>(real, 6, recorder); }
    virtual void* errorRecorder() { return call<void*>(real, 7); }
    virtual void reset() { call<void>(real, 8); }
    virtual void* buildSerialized(void* network, void* config) { return call<void*>(real, 9, unwrap(network), config); }
    virtual bool isSupported(void* network, void* config) { return call<bool>(real, 10, unwrap(network), config); }
    virtual void* logger() { return call<void*>(real, 11); }
    virtual bool setMaxThreads(int32_t threads) { return call<bool>(real, 12, threads); }
    virtual int32_t maxThreads() { return call<int32_t>(real, 13); }
    virtual void* pluginRegistry() { return call<void*>(real, 14); }
    virtual void* buildEngineWithConfig(void*, void*) { return nullptr; }  // needs a GPU; the only slot RTX lacks
    virtual bool buildToStream(void* network, void* config, void* writer) {
        return call<bool>(real, 15, unwrap(network), config, writer);
    }
    virtual void* buildWithKernelText(void*, void*, void*&) { return nullptr; }  // not offered by RTX
};

struct Builder : Handle {
    void* real;
    std::unique_ptr<BuilderImpl> methods;
    explicit Builder(void* builder) : real(builder), methods(new BuilderImpl(implOf(builder))) { impl = methods.get(); }
    ~Builder() override { destroy(real); }
};

// Each library refuses callers that were compiled against another version, so RTX is asked with its own number.
int32_t rtxVersion() { return symbol<int32_t (*)()>("getInferLibVersion")(); }

}  // namespace

extern "C" {

int32_t getInferLibVersion() { return kReportedVersion; }

void* createInferBuilder_INTERNAL(void* logger, int32_t) {
    void* real = symbol<void* (*)(void*, int32_t)>("createInferBuilder_INTERNAL")(logger, rtxVersion());
    return real == nullptr ? nullptr : static_cast<Handle*>(new Builder(real));
}

void* createInferRuntime_INTERNAL(void* logger, int32_t) {
    return symbol<void* (*)(void*, int32_t)>("createInferRuntime_INTERNAL")(logger, rtxVersion());
}

void* createInferRefitter_INTERNAL(void* engine, void* logger, int32_t) {
    return symbol<void* (*)(void*, void*, int32_t)>("createInferRefitter_INTERNAL")(engine, logger, rtxVersion());
}

void* getBuilderPluginRegistry(int32_t capability) {
    return symbol<void* (*)(int32_t)>("getBuilderPluginRegistry")(capability);
}

void* getPluginRegistry() { return symbol<void* (*)()>("getPluginRegistry")(); }

// For the parser stand-in: the real network behind a proxy.
void* shim11_unwrap_network(void* network) { return unwrap(network); }
}
