/* Which process started CUDA, on which card a thread is, and the bytes that this process holds on each card.

   What it holds is written to a file of the folder FAKE_HELD for each card, where the fake NVML and the other processes
   of the null GPU read it. Cards, their order and CUDA_VISIBLE_DEVICES: cards.h of the fake driver. */
#include "process.hpp"

#include <dlfcn.h>

std::recursive_mutex lock;

static const size_t CONTEXT_BYTES = (size_t)500 << 20;  // of the order of a context with torch's kernels; not measured
static int owner = 0;                                   // the process that started CUDA
static int count = 0, lines[MOST];  // the cards that this process sees, by their lines in FAKE_CARDS
static Card seen[MOST];
static size_t held[MOST];
static bool has_context[MOST];
static thread_local int current = 0;
static thread_local cudaError_t last = cudaSuccess;

cudaError_t failed(cudaError_t error) { return last = error; }
int current_card() { return current; }

int card_count() { return count; }

Card card_at(int ordinal) { return seen[ordinal]; }

static void see_cards() {  // once, as CUDA does: torch asks for its device before each operator
    for (int line; count < MOST && (line = line_of(count)) >= 0; count++) {
        read_cards();
        seen[count] = cards[lines[count] = line];
    }
}

static void tell_driver() {  // so that it notes the process (FAKE_CUDA_LOG)
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    auto start_driver = driver ? (int (*)(unsigned))dlsym(driver, "cuInit") : nullptr;
    if (start_driver) start_driver(0);
}

cudaError_t start() {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (!owner) {
        owner = getpid();
        see_cards();
        tell_driver();
    }
    if (owner != getpid()) return failed(cudaErrorInitializationError);
    return card_count() ? cudaSuccess : failed(cudaErrorNoDevice);
}

static void write_held(int ordinal) {
    const char *folder = getenv("FAKE_HELD");
    char path[1024];
    if (!folder) return;
    snprintf(path, sizeof path, "%s/%s.%d", folder, card_at(ordinal).uuid, getpid());
    FILE *file = fopen(path, "w");
    if (!file) return;
    fprintf(file, "%zu", held[ordinal]);
    fclose(file);
}

size_t whole_bytes(int ordinal) {
    Card card = card_at(ordinal);
    return (size_t)(card.total - card.reserved) << 20;
}

size_t free_bytes(int ordinal) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    read_cards();  // anew: others may hold more by now
    Card card = cards[lines[ordinal]];
    size_t held_there = getenv("FAKE_HELD") ? held_bytes(card.uuid) : held[ordinal];
    size_t taken = ((size_t)card.used << 20) + held_there, whole = whole_bytes(ordinal);
    return whole > taken ? whole - taken : 0;
}

bool take(int ordinal, size_t bytes) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (bytes > free_bytes(ordinal)) return false;
    held[ordinal] += bytes;
    write_held(ordinal);
    return true;
}

void give(int ordinal, size_t bytes) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    held[ordinal] -= bytes;
    write_held(ordinal);
}

cudaError_t context() {
    cudaError_t error = start();
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (error || has_context[current]) return error;
    if (!take(current, CONTEXT_BYTES)) return failed(cudaErrorMemoryAllocation);
    has_context[current] = true;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaGetDevice(int *device) {
    *device = current;
    return start();
}

EXPORTED cudaError_t cudaSetDevice(int device) {
    if (cudaError_t error = start()) return error;
    if (device < 0 || device >= card_count()) return failed(cudaErrorInvalidDevice);
    current = device;
    return context();
}

EXPORTED cudaError_t cudaGetDeviceCount(int *count) {
    cudaError_t error = start();
    *count = error ? 0 : card_count();
    return error;
}

EXPORTED cudaError_t cudaDeviceSynchronize() { return context(); }
EXPORTED cudaError_t cudaPeekAtLastError() { return last; }

EXPORTED cudaError_t cudaGetLastError() {
    cudaError_t error = last;
    last = cudaSuccess;
    return error;
}

EXPORTED const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInitializationError: return "initialization error";
        case cudaErrorNoDevice: return "no CUDA-capable device is detected";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        default: return "an error of the null GPU";
    }
}

EXPORTED const char *cudaGetErrorName(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorOfTheNullGpu";
}
