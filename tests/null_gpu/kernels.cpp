/* Kernels, streams and events of the null GPU: a kernel is not started, a stream is always idle, an event knows its time. */
#include <ctime>

#include "process.hpp"

// -- kernels: what nvcc's code calls for each, of which none runs -------------------------------------------------------

EXPORTED void **__cudaRegisterFatBinary(void *) {
    static void *handle;
    return &handle;
}

static thread_local long launched = 0;

/* Kernels that this thread would have started so far. */
EXPORTED long null_gpu_launched() { return launched; }

// Not zero: the code of a launch ends there.
EXPORTED unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void *) {
    launched++;
    return 1;
}
EXPORTED cudaError_t __cudaPopCallConfiguration(dim3 *, dim3 *, size_t *, void *) { return cudaErrorInvalidValue; }

EXPORTED cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *found, const void *) {
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024;
    found->numRegs = 32;
    found->binaryVersion = found->ptxVersion = 90;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *, int, size_t) {
    *count = 8;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *, int, size_t,
                                                                            unsigned) {
    *count = 8;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaGetSymbolAddress(void **address, const void *) {
    static char variable[1 << 16];
    *address = variable;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void *argument) {
    function(argument);
    return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *argument, unsigned) {
    function(stream, cudaSuccess, argument);
    return cudaSuccess;
}

// -- streams ------------------------------------------------------------------------------------------------------------

EXPORTED cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    static long made = 0;
    std::lock_guard<std::recursive_mutex> guard(lock);
    *stream = (cudaStream_t)(made += 16);
    return context();
}

EXPORTED cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) { return cudaStreamCreate(stream); }
EXPORTED cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) { return cudaStreamCreate(stream); }

EXPORTED cudaError_t cudaStreamGetPriority(cudaStream_t, int *priority) {
    *priority = 0;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return start();
}

EXPORTED cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus *status, unsigned long long *,
                                              cudaGraph_t *, const cudaGraphNode_t **, const cudaGraphEdgeData **,
                                              size_t *) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

// -- events -------------------------------------------------------------------------------------------------------------

struct Event {
    double at_s;
};

EXPORTED cudaError_t cudaEventCreate(cudaEvent_t *event) {
    *event = (cudaEvent_t) new Event{0};
    return context();
}

EXPORTED cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) { return cudaEventCreate(event); }

EXPORTED cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete (Event *)event;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    ((Event *)event)->at_s = now.tv_sec + 1e-9 * now.tv_nsec;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    return cudaEventRecord(event, stream);
}

EXPORTED cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    *milliseconds = 1e3 * (((Event *)to)->at_s - ((Event *)from)->at_s);
    return cudaSuccess;
}
