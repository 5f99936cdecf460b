/* A clock that was set: the time of the day is off by the nanoseconds in the file $CLOCK_OFFSET, an int64. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL

static volatile int64_t *offset;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("CLOCK_OFFSET");
    int fd = path ? open(path, O_RDONLY) : -1;
    if (fd < 0) return;
    void *shared = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (shared != MAP_FAILED) offset = shared;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && offset && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t at = now->tv_sec * SECOND + now->tv_nsec + *offset;
        now->tv_sec = at / SECOND;
        now->tv_nsec = at % SECOND;
    }
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec at;
    (void)zone;
    int failed = clock_gettime(CLOCK_REALTIME, &at);
    if (!failed) {
        now->tv_sec = at.tv_sec;
        now->tv_usec = at.tv_nsec / 1000;
    }
    return failed;
}

time_t time(time_t *out) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (out) *out = at.tv_sec;
    return at.tv_sec;
}
