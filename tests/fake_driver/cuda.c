/* libcuda.so.1 without a driver. Notes in the file FAKE_CUDA_LOG which process starts CUDA. CUDA's order of the cards,
   by their lines in FAKE_CARDS from 0, is FAKE_CUDA_ORDER ("1,0"); without it no card can be used. */
#include "cards.h"

enum { OK = 0, NOT_INITIALIZED = 3, NO_DEVICE = 100 };
static int started = 0;

static int line_of(int ordinal) {
    char text[128], *rest, *part;
    const char *order = getenv("FAKE_CUDA_ORDER");
    snprintf(text, sizeof text, "%s", order ? order : "");
    for (part = strtok_r(text, ",", &rest); part; part = strtok_r(NULL, ",", &rest))
        if (ordinal-- == 0) return atoi(part);
    return -1;
}

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
