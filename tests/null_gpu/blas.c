/* libcublas.so.13 and libcublasLt.so.13 of the null GPU: a handle, an algorithm, and no product is computed. The functions
   that are not here do nothing too: build.py writes them. */
#include <string.h>

enum { ALGORITHM_BYTES = 96 }; /* of cublasLtMatmulHeuristicResult_t */

int cublasCreate_v2(void **handle) {
    static long made;
    *handle = (void *)(made += 64);
    return 0;
}

int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *results, int *found) {
    memset(results, 0, wanted > 0 ? ALGORITHM_BYTES : 0);
    *found = 1;
    return 0;
}
