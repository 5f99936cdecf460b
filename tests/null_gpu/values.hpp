/* Whether memory of a card has values here: all of it with NULL_GPU_VALUES=1 (site/card_values.py), and with
   NULL_GPU_VALUES=small what is copied, or sent between ranks, in few bytes: DDP sends counts and indices to itself.
   What is read as a number of 4 bytes stays zero there. */
#pragma once
#include <cstddef>
#include <cstdlib>
#include <cstring>

static inline bool values_are(const char *kind) {
    const char *given = getenv("NULL_GPU_VALUES");
    return given && !strcmp(given, kind);
}

static inline bool has_values() {
    static const bool all = values_are("1");
    return all;
}

static inline bool has_values(size_t bytes) {
    static const bool small = values_are("small");
    return has_values() || (small && bytes <= (size_t)1 << 16);
}
