/* libnccl.so.2 of the null GPU: ranks of one machine meet in shared memory that the communicator's id names.

   Every call waits for the other ranks, as if the stream were asked for at once; where a rank does not come the call
   ends in ncclSystemError. Numbers are moved where memory has values (values.hpp). Without, ranks only wait for each
   other: memory of a card is mapped and never read. The functions that are not here do nothing: build.py writes them. */
#define __CUDA_FP16_H__  // nccl.h needs none of the card's own types, and their headers need more than torch brings
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <fcntl.h>
#include <linux/futex.h>
#include <nccl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "values.hpp"

#define EXPORTED extern "C" __attribute__((visibility("default")))

static const size_t PIECE = 1 << 20;  // bytes that a rank shows the others at once
static const size_t BOX = 1 << 16;    // bytes of a message on its way from one rank to another
static const double LONGEST_WAIT_S = 120;  // for the other ranks; NULL_NCCL_WAIT_S says otherwise

static double now_s() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

static double end_of_wait_s() {
    static const char *given = getenv("NULL_NCCL_WAIT_S");
    return now_s() + (given ? atof(given) : LONGEST_WAIT_S);
}

// -- what ranks share; zeros at first -----------------------------------------------------------------------------------

struct Box {
    std::atomic<uint32_t> sent, taken;  // messages so far; one is on its way where they differ
    char bytes[BOX];
};

struct Meeting {
    std::atomic<uint32_t> arrived, number;  // of ranks at the meeting, of meetings that ended
};

struct ncclComm {
    int rank, ranks, splits = 0;
    std::string name;
    char *shared;

    Meeting *meeting() const { return (Meeting *)shared; }
    char *piece_of(int of) const { return shared + sizeof(Meeting) + of * PIECE; }
    Box *box(int from, int to) const { return (Box *)piece_of(ranks) + from * ranks + to; }
    size_t shared_bytes() const { return sizeof(Meeting) + ranks * PIECE + (size_t)ranks * ranks * sizeof(Box); }
};

/* Wait until every rank is here. */
static ncclResult_t meet(ncclComm_t group) {
    Meeting *meeting = group->meeting();
    uint32_t number = meeting->number;
    if (++meeting->arrived == (uint32_t)group->ranks) {
        meeting->arrived = 0;
        meeting->number++;
        syscall(SYS_futex, &meeting->number, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
        return ncclSuccess;
    }
    for (double end = end_of_wait_s(); meeting->number == number;) {
        double left = end - now_s();
        if (left <= 0) return ncclSystemError;
        timespec wait = {(time_t)left, (long)(1e9 * (left - (time_t)left))};
        syscall(SYS_futex, &meeting->number, FUTEX_WAIT, number, &wait, nullptr, 0);
    }
    return ncclSuccess;
}

static ncclResult_t joined(ncclComm_t *made, const std::string &name, int rank, int ranks) {
    ncclComm_t group = new ncclComm{rank, ranks};
    group->name = name;
    int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, group->shared_bytes())) return ncclSystemError;
    void *found = mmap(nullptr, group->shared_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (found == MAP_FAILED) return ncclSystemError;
    group->shared = (char *)found;
    *made = group;
    ncclResult_t met = meet(group);
    if (rank == 0 || met) shm_unlink(name.c_str());
    return met;
}

// -- communicators ------------------------------------------------------------------------------------------------------

EXPORTED ncclResult_t ncclGetVersion(int *version) {
    *version = 22907;
    return ncclSuccess;
}

EXPORTED const char *ncclGetErrorString(ncclResult_t error) {
    return error == ncclSystemError ? "a rank of the null NCCL did not come" : "an error of the null NCCL";
}

EXPORTED const char *ncclGetLastError(ncclComm_t) { return ""; }

EXPORTED ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    return getrandom(id->internal, sizeof id->internal, 0) == sizeof id->internal ? ncclSuccess : ncclSystemError;
}

static std::string name_of(const ncclUniqueId &id) {
    std::string name = "/null-nccl-";
    char text[3];
    for (int i = 0; i < 16; i++) {
        snprintf(text, sizeof text, "%02x", (unsigned char)id.internal[i]);
        name += text;
    }
    return name;
}

EXPORTED ncclResult_t ncclCommInitRank(ncclComm_t *made, int ranks, ncclUniqueId id, int rank) {
    return joined(made, name_of(id), rank, ranks);
}

EXPORTED ncclResult_t ncclCommInitRankConfig(ncclComm_t *made, int ranks, ncclUniqueId id, int rank, ncclConfig_t *) {
    return joined(made, name_of(id), rank, ranks);
}

EXPORTED ncclResult_t ncclCommInitRankScalable(ncclComm_t *made, int ranks, int rank, int, ncclUniqueId *ids,
                                               ncclConfig_t *) {
    return joined(made, name_of(ids[0]), rank, ranks);
}

EXPORTED ncclResult_t ncclCommSplit(ncclComm_t group, int color, int key, ncclComm_t *made, ncclConfig_t *) {
    struct Wish {
        int color, key, rank;
    } wish = {color, key, group->rank};
    memcpy(group->piece_of(group->rank), &wish, sizeof wish);
    if (ncclResult_t error = meet(group)) return error;
    std::vector<Wish> same;
    for (int rank = 0; rank < group->ranks; rank++) {
        Wish other = *(Wish *)group->piece_of(rank);
        if (other.color == color) same.push_back(other);
    }
    if (ncclResult_t error = meet(group)) return error;
    std::string name = group->name + "-" + std::to_string(group->splits++) + "-" + std::to_string(color);
    *made = nullptr;
    if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
    std::stable_sort(same.begin(), same.end(), [](Wish a, Wish b) { return a.key < b.key; });
    auto own = std::find_if(same.begin(), same.end(), [&](Wish one) { return one.rank == group->rank; });
    return joined(made, name, own - same.begin(), same.size());
}

EXPORTED ncclResult_t ncclCommFinalize(ncclComm_t group) { return meet(group); }

EXPORTED ncclResult_t ncclCommDestroy(ncclComm_t group) {
    munmap(group->shared, group->shared_bytes());
    delete group;
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclCommAbort(ncclComm_t group) { return ncclCommDestroy(group); }

EXPORTED ncclResult_t ncclCommCount(ncclComm_t group, int *count) {
    *count = group->ranks;
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclCommUserRank(ncclComm_t group, int *rank) {
    *rank = group->rank;
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t *error) {
    *error = ncclSuccess;
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclMemAlloc(void **pointer, size_t bytes) {
    *pointer = malloc(bytes);
    return *pointer ? ncclSuccess : ncclSystemError;
}

EXPORTED ncclResult_t ncclMemFree(void *pointer) {
    free(pointer);
    return ncclSuccess;
}

// -- numbers ------------------------------------------------------------------------------------------------------------

struct BFloat16 {
    uint16_t bits;
    operator float() const {
        uint32_t wide = (uint32_t)bits << 16;
        float value;
        memcpy(&value, &wide, sizeof value);
        return value;
    }
    BFloat16(float value) {
        uint32_t wide;
        memcpy(&wide, &value, sizeof wide);
        bits = value != value ? 0x7fc0 : (wide + 0x7fff + (wide >> 16 & 1)) >> 16;  // to the nearest, ties to even
    }
};

static size_t bytes_of(ncclDataType_t type) {
    switch (type) {
        case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
        case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
        case ncclFloat16: case ncclBfloat16: return 2;
        default: return 1;
    }
}

static std::vector<double> factors;  // of the operations that ncclRedOpCreatePreMulSum made

template <typename Number>
static double number_at(const void *pointer) {
    return *(const Number *)pointer;
}

static double number_at(const void *pointer, ncclDataType_t type) {
    switch (type) {
        case ncclFloat64: return number_at<double>(pointer);
        case ncclFloat16: return number_at<_Float16>(pointer);
        case ncclBfloat16: return (float)*(const BFloat16 *)pointer;
        default: return number_at<float>(pointer);
    }
}

EXPORTED ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *made, void *factor, ncclDataType_t type,
                                               ncclScalarResidence_t, ncclComm_t) {
    *made = (ncclRedOp_t)(ncclNumOps + factors.size());
    factors.push_back(has_values() ? number_at(factor, type) : 1);
    return ncclSuccess;
}

/* `count` numbers of every rank, one after the other in `Wide`, to `to`. */
template <typename Number, typename Wide>
static void reduce(void *to, const std::vector<const char *> &parts, size_t count, ncclRedOp_t operation) {
    bool scales = operation >= ncclNumOps;
    Wide factor = scales ? (Wide)factors[operation - ncclNumOps] : 1;
    for (size_t i = 0; i < count; i++) {
        Wide found = (Wide)((const Number *)parts[0])[i] * factor;
        for (size_t rank = 1; rank < parts.size(); rank++) {
            Wide other = (Wide)((const Number *)parts[rank])[i] * factor;
            switch (operation) {
                case ncclProd: found *= other; break;
                case ncclMax: found = std::max(found, other); break;
                case ncclMin: found = std::min(found, other); break;
                default: found += other;
            }
        }
        ((Number *)to)[i] = (Number)(operation == ncclAvg ? found / (Wide)parts.size() : found);
    }
}

static ncclResult_t reduce(void *to, const std::vector<const char *> &parts, size_t bytes, ncclDataType_t type,
                           ncclRedOp_t operation) {
    size_t count = bytes / bytes_of(type);
    switch (type) {
        case ncclInt8: reduce<int8_t, int8_t>(to, parts, count, operation); break;
        case ncclUint8: reduce<uint8_t, uint8_t>(to, parts, count, operation); break;
        case ncclInt32: reduce<int32_t, int32_t>(to, parts, count, operation); break;
        case ncclUint32: reduce<uint32_t, uint32_t>(to, parts, count, operation); break;
        case ncclInt64: reduce<int64_t, int64_t>(to, parts, count, operation); break;
        case ncclUint64: reduce<uint64_t, uint64_t>(to, parts, count, operation); break;
        case ncclFloat16: reduce<_Float16, float>(to, parts, count, operation); break;
        case ncclBfloat16: reduce<BFloat16, float>(to, parts, count, operation); break;
        case ncclFloat32: reduce<float, float>(to, parts, count, operation); break;
        case ncclFloat64: reduce<double, double>(to, parts, count, operation); break;
        default: return ncclInvalidArgument;
    }
    return ncclSuccess;
}

// -- collectives --------------------------------------------------------------------------------------------------------

/* Show every rank `bytes` of `mine` (null: nothing of this rank), a piece at a time; `read` the pieces of all.

   `read` is given where the piece begins, its bytes, and the pieces by rank. */
template <typename Read>
static ncclResult_t shown(ncclComm_t group, const void *mine, size_t bytes, Read read) {
    std::vector<const char *> pieces;
    for (int rank = 0; rank < group->ranks; rank++) pieces.push_back(group->piece_of(rank));
    size_t at = 0;
    do {
        size_t piece = has_values(bytes) ? std::min(PIECE, bytes - at) : 0;
        if (mine && piece) memcpy(group->piece_of(group->rank), (const char *)mine + at, piece);
        if (ncclResult_t error = meet(group)) return error;
        if (ncclResult_t error = piece ? read(at, piece, pieces) : ncclSuccess) return error;
        if (ncclResult_t error = meet(group)) return error;  // before a piece is written again
        at += PIECE;
    } while (has_values(bytes) && at < bytes);
    return ncclSuccess;
}

using Pieces = const std::vector<const char *> &;

EXPORTED ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                                 int root, ncclComm_t group, cudaStream_t) {
    bool reads = root < 0 || root == group->rank;
    return shown(group, from, count * bytes_of(type), [&](size_t at, size_t bytes, Pieces pieces) {
        return reads ? reduce((char *)to + at, pieces, bytes, type, operation) : ncclSuccess;
    });
}

EXPORTED ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type,
                                    ncclRedOp_t operation, ncclComm_t group, cudaStream_t stream) {
    return ncclReduce(from, to, count, type, operation, -1, group, stream);
}

EXPORTED ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type,
                                        ncclRedOp_t operation, ncclComm_t group, cudaStream_t stream) {
    size_t bytes = count * bytes_of(type);
    std::vector<char> own(has_values(bytes) ? bytes : 0);  // `to` may lie in `from`
    for (int root = 0; root < group->ranks; root++)
        if (ncclResult_t error = ncclReduce((const char *)from + root * bytes, own.data(), count, type, operation,
                                            root, group, stream))
            return error;
    memcpy(to, own.data(), own.size());
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root,
                                    ncclComm_t group, cudaStream_t) {
    const void *mine = root == group->rank ? from : nullptr;
    return shown(group, mine, count * bytes_of(type), [&](size_t at, size_t bytes, Pieces pieces) {
        memcpy((char *)to + at, pieces[root], bytes);
        return ncclSuccess;
    });
}

EXPORTED ncclResult_t ncclBcast(void *both, size_t count, ncclDataType_t type, int root, ncclComm_t group,
                                cudaStream_t stream) {
    return ncclBroadcast(both, both, count, type, root, group, stream);
}

EXPORTED ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t group,
                                    cudaStream_t) {
    size_t whole = count * bytes_of(type);
    return shown(group, from, whole, [&](size_t at, size_t bytes, Pieces pieces) {
        for (int rank = 0; rank < group->ranks; rank++) memcpy((char *)to + rank * whole + at, pieces[rank], bytes);
        return ncclSuccess;
    });
}

// -- messages from one rank to another, alone or in a group -------------------------------------------------------------

struct Message {
    Box *box;
    bool is_sent;  // or received
    char *at;
    size_t left;
    bool done;
};

static thread_local int open_groups = 0;
static thread_local std::vector<Message> messages;

/* Move one boxful, if the other rank is ready for it. */
static bool moved(Message &message) {
    Box *box = message.box;
    if (message.is_sent != (box->sent == box->taken)) return false;
    size_t bytes = std::min(BOX, message.left);
    message.is_sent ? memcpy(box->bytes, message.at, bytes) : memcpy(message.at, box->bytes, bytes);
    message.is_sent ? ++box->sent : ++box->taken;
    message.at += bytes;
    message.left -= bytes;
    message.done = !message.left;
    return true;
}

static ncclResult_t move_messages() {
    auto is_done = [](const Message &message) { return message.done; };
    for (double end = end_of_wait_s(); !std::all_of(messages.begin(), messages.end(), is_done);) {
        bool any = false;
        for (auto message = messages.begin(); message != messages.end(); message++) {
            auto same = [&](const Message &other) {
                return !other.done && other.box == message->box && other.is_sent == message->is_sent;
            };
            bool is_first = std::none_of(messages.begin(), message, same);
            any |= !message->done && is_first && moved(*message);
        }
        if (any) continue;
        if (now_s() > end) {
            messages.clear();
            return ncclSystemError;
        }
        usleep(100);
    }
    messages.clear();
    return ncclSuccess;
}

static ncclResult_t message(Box *box, bool is_sent, const void *at, size_t bytes) {
    messages.push_back({box, is_sent, (char *)at, has_values(bytes) ? bytes : 0, false});
    return open_groups ? ncclSuccess : move_messages();
}

EXPORTED ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t group,
                               cudaStream_t) {
    return message(group->box(group->rank, peer), true, from, count * bytes_of(type));
}

EXPORTED ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t group, cudaStream_t) {
    return message(group->box(peer, group->rank), false, to, count * bytes_of(type));
}

EXPORTED ncclResult_t ncclGroupStart() {
    open_groups++;
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclGroupEnd() { return --open_groups ? ncclSuccess : move_messages(); }

EXPORTED ncclResult_t ncclAlltoAll(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t group,
                                   cudaStream_t stream) {
    size_t bytes = count * bytes_of(type);
    ncclGroupStart();
    for (int rank = 0; rank < group->ranks; rank++) {
        ncclSend((const char *)from + rank * bytes, count, type, rank, group, stream);
        ncclRecv((char *)to + rank * bytes, count, type, rank, group, stream);
    }
    return ncclGroupEnd();
}
