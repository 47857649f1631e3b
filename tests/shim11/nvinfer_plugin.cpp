// A stand-in for libnvinfer_plugin.so.11: there are no plugins, and asking for them succeeds.

extern "C" bool initLibNvInferPlugins(void*, char const*) { return true; }
