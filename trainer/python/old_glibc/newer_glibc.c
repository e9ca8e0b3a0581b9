// Symbols of glibc that are newer than 2.28 and that newer headers use without being asked. Each is hidden: the libraries of a newer
// system keep their own.
#include <pthread.h>
#include <time.h>

#pragma GCC visibility push(hidden)

// 2.32: whether the process has only one thread, in which reference counts need no atomic operations. "No" is always right.
extern const char __libc_single_threaded;
const char __libc_single_threaded = 0;

// 2.30: std::condition_variable waits with it for a time of the monotonic clock. 2.28 waits only for a time of the system's clock: a
// wait is longer if that clock is set back meanwhile, as in every program compiled on such a system.
int pthread_cond_clockwait(pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t clock, const struct timespec *end) {
    struct timespec now, system;
    clock_gettime(clock, &now);
    clock_gettime(CLOCK_REALTIME, &system);
    system.tv_sec += end->tv_sec - now.tv_sec;
    system.tv_nsec += end->tv_nsec - now.tv_nsec;
    if (system.tv_nsec < 0) {
        system.tv_sec -= 1;
        system.tv_nsec += 1000000000;
    } else if (system.tv_nsec >= 1000000000) {
        system.tv_sec += 1;
        system.tv_nsec -= 1000000000;
    }
    return pthread_cond_timedwait(condition, mutex, &system);
}

#pragma GCC visibility pop
