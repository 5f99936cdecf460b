/* libcuda.so.1 without a driver. Notes in the file FAKE_CUDA_LOG which process starts CUDA. CUDA's order of the cards is
   FAKE_CUDA_ORDER's (cards.h); without it no card can be used. */
#include "cards.h"

enum { OK = 0, NOT_INITIALIZED = 3, NO_DEVICE = 100 };
static int started = 0;

int cuInit(unsigned flags) {
    const char *path = getenv("FAKE_CUDA_LOG");
    FILE *log = path ? fopen(path, "a") : NULL;
    if (log) { fprintf(log, "%d cuInit\n", getpid()); fclose(log); }
    started = line_of(0) >= 0;
    return started ? OK : NO_DEVICE;
}

int cuDeviceGetCount(int *count) {
    if (!started) return NOT_INITIALIZED;
    for (*count = 0; line_of(*count) >= 0; (*count)++) {}
    return OK;
}

int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return OK; }

int cuDeviceGetUuid_v2(unsigned char *bytes, int device) {
    const char *text;
    read_cards();
    text = strchr(cards[line_of(device)].uuid, '-') + 1;
    for (int i = 0; i < 16; text += 2, i++) {
        text += *text == '-';
        sscanf(text, "%2hhx", &bytes[i]);
    }
    return OK;
}

/* What the CUDA runtime of torch's own builds asks first; every other function of the driver refuses. */
int cuDriverGetVersion(int *version) { *version = 13000; return OK; }
static int refuse(void) { return NO_DEVICE; }

int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *status) {
    static const struct { const char *name; void *function; } known[] = {
        {"cuInit", cuInit}, {"cuDriverGetVersion", cuDriverGetVersion}, {"cuDeviceGetCount", cuDeviceGetCount},
        {"cuDeviceGet", cuDeviceGet}, {"cuGetProcAddress", cuGetProcAddress_v2},
    };
    *function = refuse;
    for (int i = 0; i < 5; i++)
        if (!strcmp(name, known[i].name)) *function = known[i].function;
    if (status) *status = 0;
    return OK;
}

int cuGetProcAddress(const char *name, void **function, int version, unsigned long long flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}

/* What torch's CUDA builds ask besides, on the null GPU (tests/null_gpu). */
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *active = 1; if (flags) *flags = 0; return OK; }
int cuCtxGetCurrent(void **context) { *context = (void *)64; return OK; }
int cuCtxSetCurrent(void *context) { return OK; }
int cuGetErrorName(int error, const char **text) { *text = "an error of the fake driver"; return OK; }
int cuGetErrorString(int error, const char **text) { return cuGetErrorName(error, text); }

/* And what Triton calls to load and start a kernel, of which none is started. */
#define DOES_NOTHING(name) int name(void) { return OK; }
DOES_NOTHING(cuDeviceGetAttribute)
DOES_NOTHING(cuDevicePrimaryCtxRetain)
DOES_NOTHING(cuFuncGetAttribute)
DOES_NOTHING(cuFuncSetAttribute)
DOES_NOTHING(cuFuncSetCacheConfig)
DOES_NOTHING(cuLaunchCooperativeKernel)
DOES_NOTHING(cuLaunchKernel)
DOES_NOTHING(cuLinkAddData_v2)
DOES_NOTHING(cuLinkComplete)
DOES_NOTHING(cuLinkCreate_v2)
DOES_NOTHING(cuModuleGetFunction)
DOES_NOTHING(cuModuleLoad)
DOES_NOTHING(cuModuleLoadData)
DOES_NOTHING(cuModuleLoadDataEx)
DOES_NOTHING(cuModuleUnload)
DOES_NOTHING(cuOccupancyMaxActiveBlocksPerMultiprocessor)
DOES_NOTHING(cuPointerGetAttribute)
DOES_NOTHING(cuTensorMapEncodeTiled)
