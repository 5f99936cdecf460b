/* What the null GPU says of itself: sizes of an H100, with the name, memory and capability of the cards of FAKE_CARDS;
   and the functions of the driver that torch asks for by name. */
#include <cstdio>

#include "process.hpp"

static const int VERSION = 13000;  // of CUDA

EXPORTED cudaError_t cudaDriverGetVersion(int *version) {
    *version = VERSION;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = VERSION;
    return cudaSuccess;
}

static void write_uuid(const Card &card, cudaDeviceProp *found) {
    const char *text = strchr(card.uuid, '-') + 1;
    for (int i = 0; i < 16; text += 2, i++) {
        text += *text == '-';
        sscanf(text, "%2hhx", (unsigned char *)&found->uuid.bytes[i]);
    }
}

EXPORTED cudaError_t cudaGetDeviceProperties(cudaDeviceProp *found, int device) {
    if (cudaError_t error = start()) return error;
    if (device < 0 || device >= card_count()) return failed(cudaErrorInvalidDevice);
    Card card = card_at(device);
    memset(found, 0, sizeof *found);
    snprintf(found->name, sizeof found->name, "%s", card.name);
    write_uuid(card, found);
    found->totalGlobalMem = whole_bytes(device);
    found->major = card.major;
    found->minor = card.minor;
    found->multiProcessorCount = 132;
    found->warpSize = 32;
    found->maxThreadsPerMultiProcessor = 2048;
    found->maxBlocksPerMultiProcessor = 32;
    found->maxThreadsPerBlock = 1024;
    found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
    found->maxThreadsDim[2] = 64;
    found->maxGridSize[0] = 2147483647;
    found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->regsPerBlock = found->regsPerMultiprocessor = 65536;
    found->sharedMemPerBlock = 49152;
    found->sharedMemPerBlockOptin = 232448;
    found->sharedMemPerMultiprocessor = 233472;
    found->l2CacheSize = 50 << 20;
    found->memoryBusWidth = 5120;
    found->textureAlignment = 512;
    found->concurrentKernels = found->unifiedAddressing = 1;
    found->pciBusID = device + 1;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp card;
    if (cudaError_t error = cudaGetDeviceProperties(&card, device)) return error;
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: *value = card.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = card.minor; break;
        case cudaDevAttrMultiProcessorCount: *value = card.multiProcessorCount; break;
        case cudaDevAttrWarpSize: *value = card.warpSize; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = card.maxThreadsPerBlock; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = card.maxThreadsPerMultiProcessor; break;
        case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
        case cudaDevAttrMaxGridDimX: *value = card.maxGridSize[0]; break;
        case cudaDevAttrMaxRegistersPerBlock: *value = card.regsPerBlock; break;
        case cudaDevAttrMaxRegistersPerMultiprocessor: *value = card.regsPerMultiprocessor; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = card.sharedMemPerBlock; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = card.sharedMemPerBlockOptin; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = card.sharedMemPerMultiprocessor; break;
        case cudaDevAttrCooperativeLaunch: *value = 1; break;
        default: *value = 0;
    }
    return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) {
    *can = 1;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceGetPCIBusId(char *text, int n, int device) {
    snprintf(text, n, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}

// -- the driver's functions, which torch asks for by name --------------------------------------------------------------

static int nothing() { return 0; }

static int error_text(int, const char **text) {
    *text = "an error of the null GPU";
    return 0;
}

static int attribute(int *value, int which, int device) {
    return cudaDeviceGetAttribute(value, (cudaDeviceAttr)which, device);
}

static int device_at(int *device, int ordinal) {
    *device = ordinal;
    return 0;
}

static int has_context(int, unsigned *flags, int *active) {
    if (flags) *flags = 0;
    *active = 1;
    return 0;
}

EXPORTED cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long,
                                                      cudaDriverEntryPointQueryResult *found) {
    static const struct { const char *name; void *function; } known[] = {
        {"cuGetErrorString", (void *)error_text}, {"cuGetErrorName", (void *)error_text},
        {"cuDeviceGetAttribute", (void *)attribute}, {"cuDeviceGet", (void *)device_at},
        {"cuDevicePrimaryCtxGetState", (void *)has_context},
    };
    if (found) *found = cudaDriverEntryPointSuccess;
    *function = driver_memory_function(name);
    for (auto &one : known)
        if (!strcmp(name, one.name)) *function = one.function;
    if (!*function) *function = (void *)nothing;
    return cudaSuccess;
}
