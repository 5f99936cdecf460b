/* What the parts of the null runtime share: which process started CUDA, on which card a thread is, what is held there. */
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <mutex>

#include "cards.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

extern std::recursive_mutex lock;

/* Start CUDA in this process, once. cudaErrorInitializationError in a fork of a process that had started it. */
cudaError_t start();

/* start(), and the bytes of a context on this thread's card. */
cudaError_t context();

cudaError_t failed(cudaError_t error); /* `error`, which cudaGetLastError tells once */
int current_card();                    /* of this thread, counted as the program counts */
int card_count();
Card card_at(int ordinal);

/* Give this process `bytes` more on the card; false where the card has not so many left. */
bool take(int ordinal, size_t bytes);
void give(int ordinal, size_t bytes);
size_t whole_bytes(int ordinal); /* of the card, less what the driver reserves */
size_t free_bytes(int ordinal);

void *driver_memory_function(const char *name); /* of the driver's virtual memory (memory.cpp), or NULL */
