/* libnvidia-ml.so.1 without a driver: what autofit asks of it, and no more. Results are NVML's: 0 is success. */
#include "cards.h"

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, NO_DRIVER = 9, LOST = 15 };
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;

static Card *card_of(void *handle) { read_cards(); return &cards[(long)handle - 1]; }
static int is_slice(int i) { return !strcmp(cards[i].kind, "slice"); }

/* FAKE_START: the result of starting NVML. */
int nvmlInitWithFlags(unsigned flags) {
    if (getenv("FAKE_HANG")) sleep(60);
    if (getenv("FAKE_START")) return atoi(getenv("FAKE_START"));
    return read_cards() < 0 ? NO_DRIVER : OK;
}
int nvmlSystemGetDriverVersion(char *text, unsigned n) { snprintf(text, n, "580.65.06"); return OK; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int result) { return "from the fake driver"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    int n = read_cards();
    *count = 0;
    for (int i = 0; i < n; i++) *count += !is_slice(i);
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    int n = read_cards();
    for (int i = 0; i < n; i++)
        if (!is_slice(i) && index-- == 0) {
            *handle = (void *)(long)(i + 1);
            return !strcmp(cards[i].kind, "lost") ? LOST : !strcmp(cards[i].kind, "forbidden") ? NO_PERMISSION : OK;
        }
    return INVALID;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    int n = read_cards();
    for (int i = 0; i < n; i++)
        if (!strcmp(uuid, cards[i].uuid)) { *handle = (void *)(long)(i + 1); return OK; }
    return NOT_FOUND;
}

int nvmlDeviceGetName(void *handle, char *text, unsigned n) { snprintf(text, n, "%s", card_of(handle)->name); return OK; }
int nvmlDeviceGetUUID(void *handle, char *text, unsigned n) { snprintf(text, n, "%s", card_of(handle)->uuid); return OK; }

int nvmlDeviceGetMemoryInfo(void *handle, Memory *found) {
    Card *card = card_of(handle);
    if (!strcmp(card->kind, "dying")) return LOST;
    found->total = card->total << 20;
    found->used = ((card->used + card->reserved) << 20) + held_bytes(card->uuid);
    found->free = found->total - found->used;
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, MemoryV2 *found) {
    Card *card = card_of(handle);
    if (getenv("FAKE_OLD_DRIVER")) return NOT_SUPPORTED;
    found->total = card->total << 20;
    found->reserved = card->reserved << 20;
    found->used = (card->used << 20) + held_bytes(card->uuid);
    found->free = found->total - found->used - found->reserved;
    return OK;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *pending) {
    *now = *pending = !strcmp(card_of(handle)->kind, "sliced");
    return *now ? OK : NOT_SUPPORTED;
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) { *count = 7; return OK; }

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **slice) {
    int n = read_cards();
    for (long i = (long)handle; i < n && is_slice(i); i++)
        if (index-- == 0) { *slice = (void *)(i + 1); return OK; }
    return NOT_FOUND;
}

int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    *major = card_of(handle)->major;
    *minor = card_of(handle)->minor;
    return OK;
}

int nvmlDeviceGetClockInfo(void *handle, int kind, unsigned *mhz) {
    if (!strcmp(card_of(handle)->kind, "slice")) return NOT_SUPPORTED;
    *mhz = kind == 1 ? 1980 : 1;
    return OK;
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) {
    if (!strcmp(card_of(handle)->kind, "slice")) return NOT_SUPPORTED;
    *milliwatts = 412345;
    return OK;
}

int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *celsius) {
    if (!strcmp(card_of(handle)->kind, "slice")) return NOT_SUPPORTED;
    *celsius = 51;
    return OK;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *bits) { *bits = 4; return OK; }

int nvmlDeviceGetUtilizationRates(void *handle, unsigned *rates) {
    if (!strcmp(card_of(handle)->kind, "slice")) return NOT_SUPPORTED;
    rates[0] = 87;
    rates[1] = 40;
    return OK;
}

/* FAKE_ECC: uncorrectable errors of every card, kind 1 and counter 0 (volatile). */
int nvmlDeviceGetTotalEccErrors(void *handle, int kind, int counter, unsigned long long *count) {
    if (kind != 1 || counter != 0) return INVALID;
    *count = getenv("FAKE_ECC") ? atoi(getenv("FAKE_ECC")) : 0;
    return OK;
}

typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;

/* FAKE_DESKTOP: one process draws on every card. */
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count, Process *found) {
    unsigned room = *count;
    *count = getenv("FAKE_DESKTOP") != NULL;
    if (*count && room) found[0].pid = 1, found[0].used = 0;
    return *count > room ? 7 : OK;
}

/* Those of FAKE_HELD, then FAKE_PROCESSES: UUID PID MIB, a line each; MIB -1 is what a driver says that does not tell. */
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, Process *found) {
    const char *path = getenv("FAKE_PROCESSES");
    FILE *file = path ? fopen(path, "r") : NULL;
    char uuid[96];
    unsigned pid, n = 0, room = *count;
    long long mib;
    DIR *folder = holders();
    unsigned long long bytes;
    while ((pid = next_holder(folder, card_of(handle)->uuid, &bytes))) {
        if (n < room) { found[n].pid = pid; found[n].used = bytes; }
        n++;
    }
    if (folder) closedir(folder);
    while (file && fscanf(file, " %95s %u %lld", uuid, &pid, &mib) == 3) {
        if (strcmp(uuid, card_of(handle)->uuid)) continue;
        if (n < room) { found[n].pid = pid; found[n].used = mib < 0 ? ~0ULL : (unsigned long long)mib << 20; }
        n++;
    }
    if (file) fclose(file);
    *count = n;
    return n > room ? 7 : OK; /* 7: insufficient size */
}

/* What torch's CUDA builds and NCCL ask besides, on the null GPU (tests/null_gpu). A card's bus is its ordinal from 1. */
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **handle) {
    unsigned ordinal = 0;
    int line;
    sscanf(bus, "%*x:%x", &ordinal);
    line = line_of((int)ordinal - 1);
    *handle = (void *)(long)(line + 1);
    return line < 0 ? NOT_FOUND : OK;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return OK; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetGpuFabricInfoV(void) { return OK; }
int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, void *found) { *count = 0; return OK; }
