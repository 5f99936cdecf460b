/* Memory of the null GPU: addresses are mapped, never written, and so take no memory of the host.

   A copy to the card changes nothing there; a copy from the card brings zeros (values.hpp: unless it has values). What a program allocates, frees and
   maps (the driver's virtual memory, for torch's expandable segments) is counted against the card as a card would. */
#include <sys/mman.h>

#include <cstdlib>
#include <map>
#include <string>

#include "process.hpp"
#include "values.hpp"

struct Block {
    size_t bytes;
    int card;
};
static const size_t PAGE = (size_t)2 << 20;
static std::map<char *, Block> blocks;   // of cudaMalloc
static std::map<char *, size_t> ranges;  // addresses that the virtual memory reserved
static std::map<char *, size_t> pinned;  // of the host

static char *mapped(size_t bytes) {
    void *found = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return found == MAP_FAILED ? nullptr : (char *)found;
}

static bool is_in(const std::map<char *, size_t> &places, char *address) {
    auto place = places.upper_bound(address);
    return place != places.begin() && address < std::prev(place)->first + std::prev(place)->second;
}

static bool is_on_card(const void *pointer) {
    char *address = (char *)pointer;
    auto block = blocks.upper_bound(address);
    if (block != blocks.begin() && address < std::prev(block)->first + std::prev(block)->second.bytes) return true;
    return is_in(ranges, address);
}

EXPORTED cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    *pointer = nullptr;
    if (cudaError_t error = context()) return error;
    std::lock_guard<std::recursive_mutex> guard(lock);
    size_t whole = (bytes + PAGE - 1) / PAGE * PAGE;
    int card = current_card();
    if (!take(card, whole)) return failed(cudaErrorMemoryAllocation);
    char *address = mapped(whole);
    if (!address) {
        give(card, whole);
        return failed(cudaErrorMemoryAllocation);
    }
    blocks[address] = {whole, card};
    *pointer = address;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaFree(void *pointer) {
    if (!pointer) return context();
    std::lock_guard<std::recursive_mutex> guard(lock);
    auto found = blocks.find((char *)pointer);
    if (found == blocks.end()) return failed(cudaErrorInvalidValue);
    munmap(pointer, found->second.bytes);
    give(found->second.card, found->second.bytes);
    blocks.erase(found);
    return cudaSuccess;
}

// Managed memory (the paged optimizers of bitsandbytes) counts as if all of it lay on the card.
EXPORTED cudaError_t cudaMallocManaged(void **pointer, size_t bytes, unsigned) { return cudaMalloc(pointer, bytes); }
EXPORTED cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t) { return cudaMalloc(pointer, bytes); }
EXPORTED cudaError_t cudaFreeAsync(void *pointer, cudaStream_t) { return cudaFree(pointer); }

EXPORTED cudaError_t cudaMemGetInfo(size_t *free_there, size_t *whole) {
    if (cudaError_t error = context()) return error;
    *whole = whole_bytes(current_card());
    *free_there = free_bytes(current_card());
    return cudaSuccess;
}

EXPORTED cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *found, const void *pointer) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    bool there = is_on_card(pointer), is_pinned = is_in(pinned, (char *)pointer);
    auto block = blocks.find((char *)pointer);
    memset(found, 0, sizeof *found);
    found->type = there ? cudaMemoryTypeDevice : is_pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    found->device = block == blocks.end() ? current_card() : block->second.card;
    found->devicePointer = there ? (void *)pointer : nullptr;
    return cudaSuccess;
}

// -- copies -----------------------------------------------------------------------------------------------------------

static thread_local int counted = -1;

/* What this thread reads next as a number of 4 bytes off a card, such as the rows of a mask; -1: what is there. */
EXPORTED void null_gpu_counts(int number) { counted = number; }

static cudaError_t copy(void *to, const void *from, size_t bytes) {
    if (cudaError_t error = context()) return error;
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (counted >= 0 && bytes == sizeof counted && is_on_card(from) && !is_on_card(to)) {
        memcpy(to, &counted, bytes);
        return cudaSuccess;
    }
    if (!has_values() && bytes == sizeof counted && is_on_card(from) && !is_on_card(to))
        memset(to, 0, bytes);  // a loss, or a number of rows: a kernel's, which did nothing
    else if (has_values(bytes) || !is_on_card(to))
        memmove(to, from, bytes);
    return cudaSuccess;
}

static cudaError_t set(void *to, int byte, size_t bytes) {
    if (cudaError_t error = context()) return error;
    if (has_values()) memset(to, byte, bytes);
    return cudaSuccess;
}

EXPORTED cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind) { return copy(to, from, bytes); }
EXPORTED cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    return copy(to, from, bytes);
}
EXPORTED cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t bytes, cudaStream_t) {
    return copy(to, from, bytes);
}
EXPORTED cudaError_t cudaMemset(void *to, int byte, size_t bytes) { return set(to, byte, bytes); }
EXPORTED cudaError_t cudaMemsetAsync(void *to, int byte, size_t bytes, cudaStream_t) { return set(to, byte, bytes); }

// -- memory of the host -----------------------------------------------------------------------------------------------

EXPORTED cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned) {
    size_t whole = (bytes + 4095) / 4096 * 4096;
    *pointer = aligned_alloc(4096, whole);
    if (!*pointer) return failed(cudaErrorMemoryAllocation);
    std::lock_guard<std::recursive_mutex> guard(lock);
    pinned[(char *)*pointer] = whole;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaFreeHost(void *pointer) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    pinned.erase((char *)pointer);
    free(pointer);
    return cudaSuccess;
}

// -- the driver's virtual memory, which torch asks for by name ---------------------------------------------------------

enum { OK = 0, OUT_OF_MEMORY = 2 };

static int reserve(CUdeviceptr *address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
    char *found = mapped(bytes);
    if (!found) return OUT_OF_MEMORY;
    std::lock_guard<std::recursive_mutex> guard(lock);
    ranges[found] = bytes;
    *address = (CUdeviceptr)found;
    return OK;
}

static int unreserve(CUdeviceptr address, size_t bytes) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    ranges.erase((char *)address);
    munmap((void *)address, bytes);
    return OK;
}

/* A handle is a piece of the card: its bytes. */
static int create(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *wanted,
                  unsigned long long) {
    if (context() || !take(wanted->location.id, bytes)) return OUT_OF_MEMORY;
    *handle = (CUmemGenericAllocationHandle) new Block{bytes, wanted->location.id};
    return OK;
}

static int release(CUmemGenericAllocationHandle handle) {
    Block *piece = (Block *)handle;
    give(piece->card, piece->bytes);
    delete piece;
    return OK;
}

static int granularity(size_t *bytes, const CUmemAllocationProp *, int) {
    *bytes = PAGE;
    return OK;
}

void *driver_memory_function(const char *name) {
    static const std::map<std::string, void *> functions = {
        {"cuMemAddressReserve", (void *)reserve}, {"cuMemAddressFree", (void *)unreserve},
        {"cuMemCreate", (void *)create},          {"cuMemRelease", (void *)release},
        {"cuMemGetAllocationGranularity", (void *)granularity},
    };
    auto found = functions.find(name);
    return found == functions.end() ? nullptr : found->second;
}
