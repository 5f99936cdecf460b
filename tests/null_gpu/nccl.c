/* libnccl.so.2 of the null GPU: every rank has a communicator at once, and nothing is sent. The functions that are not here
   do nothing too: build.py writes them. */
#include <stdlib.h>

static void *const COMMUNICATOR = (void *)64;

int ncclGetVersion(int *version) { *version = 22907; return 0; }
const char *ncclGetErrorString(int error) { return "an error of the null GPU"; }
const char *ncclGetLastError(void *communicator) { return ""; }

int ncclGetUniqueId(char *id) {
    for (int i = 0; i < 128; i++) id[i] = i;
    return 0;
}

int ncclCommInitRank(void **made) { *made = COMMUNICATOR; return 0; }
int ncclCommInitRankConfig(void **made) { *made = COMMUNICATOR; return 0; }
int ncclCommInitRankScalable(void **made) { *made = COMMUNICATOR; return 0; }
int ncclCommSplit(void *whole, int color, int key, void **made, void *config) { *made = COMMUNICATOR; return 0; }
int ncclCommGetAsyncError(void *communicator, int *error) { *error = 0; return 0; }
int ncclMemAlloc(void **pointer, unsigned long bytes) { *pointer = malloc(bytes); return 0; }
