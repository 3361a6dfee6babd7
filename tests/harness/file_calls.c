/* Counts the calls that change files below one directory, in all processes that share a control
 * block, and stops, tears or fails one of them. Loaded before the C library (LD_PRELOAD); the
 * control block is a file, named by FILE_CALLS, whose layout is that of `file_calls.Control`. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { CREATE, WRITE, FSYNC, RENAME, UNLINK, MKDIR, RMDIR, TRUNCATE };
enum action { COUNT, KILL, TEAR, FAIL_ONCE, FAIL_FROM, SHORT };
enum { MOST = 4096, NAME = 120 };

struct control {
    int64_t count;
    int64_t at;
    int64_t action;
    int64_t error;
    int64_t kinds; /* bits: which kinds FAIL_FROM concerns */
    char directory[1024];
    struct {
        int32_t kind;
        char path[NAME];
    } log[MOST];
};

static struct control *control;

__attribute__((constructor)) static void attach(void) {
    const char *name = getenv("FILE_CALLS");
    int (*real_open)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    int descriptor = name ? real_open(name, O_RDWR | O_CLOEXEC) : -1;
    if (descriptor < 0) return;
    void *found = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (found != MAP_FAILED) control = found;
    close(descriptor);
}

static int is_inside(char *path, int directory, const char *given) {
    if (!control || !control->directory[0]) return 0;
    path[0] = 0;
    if (!given || (given[0] != '/' && directory != AT_FDCWD)) {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
        ssize_t length = readlink(link, path, PATH_MAX - 1);
        if (length < 0) return 0;
        path[length] = 0;
        if (given) {
            strncat(path, "/", PATH_MAX - 1 - strlen(path));
            strncat(path, given, PATH_MAX - 1 - strlen(path));
        }
    } else {
        strncat(path, given, PATH_MAX - 1);
    }
    size_t length = strlen(control->directory);
    return !strncmp(path, control->directory, length) && (path[length] == '/' || !path[length]);
}

/* Return 0 to go on, 1 to do half, or -1 (errno is set) to fail; or do not return. */
static int before(enum kind kind, int directory, const char *given) {
    char path[PATH_MAX];
    if (!is_inside(path, directory, given)) return 0;
    int64_t number = __atomic_fetch_add(&control->count, 1, __ATOMIC_SEQ_CST);
    if (number < MOST) {
        control->log[number].kind = kind;
        strncpy(control->log[number].path, path + strlen(control->directory), NAME - 1);
    }
    if (control->action == SHORT) return kind == WRITE;
    if (control->action == COUNT || number < control->at) return 0;
    if (control->action == FAIL_FROM) {
        if (!(control->kinds >> kind & 1)) return 0;
    } else if (number != control->at) {
        return 0;
    }
    if (control->action == KILL) kill(getpid(), SIGKILL);
    if (control->action == TEAR) {
        if (kind != WRITE) kill(getpid(), SIGKILL);
        return 1;
    }
    errno = (int)control->error;
    return -1;
}

static size_t half_of(size_t count) { return count > 1 ? count / 2 : count; }

static ssize_t after_half(ssize_t result) {
    if (control->action == TEAR) kill(getpid(), SIGKILL);
    return result;
}

#define REAL(type, name, ...) type (*real)(__VA_ARGS__) = dlsym(RTLD_NEXT, #name)

#define SIMPLE(type, name, kind, directory, given, parameters, arguments) \
    type name parameters {                                                \
        type(*real) parameters = dlsym(RTLD_NEXT, #name);                 \
        if (before(kind, directory, given) < 0) return -1;                \
        return real arguments;                                            \
    }

SIMPLE(int, fsync, FSYNC, fd, NULL, (int fd), (fd))
SIMPLE(int, fdatasync, FSYNC, fd, NULL, (int fd), (fd))
SIMPLE(int, ftruncate, TRUNCATE, fd, NULL, (int fd, off_t n), (fd, n))
SIMPLE(int, ftruncate64, TRUNCATE, fd, NULL, (int fd, off64_t n), (fd, n))
SIMPLE(int, truncate, TRUNCATE, AT_FDCWD, p, (const char *p, off_t n), (p, n))
SIMPLE(int, rename, RENAME, AT_FDCWD, a, (const char *a, const char *b), (a, b))
SIMPLE(int, renameat, RENAME, x, a, (int x, const char *a, int y, const char *b), (x, a, y, b))
SIMPLE(int, renameat2, RENAME, x, a, (int x, const char *a, int y, const char *b, unsigned f),
       (x, a, y, b, f))
SIMPLE(int, unlink, UNLINK, AT_FDCWD, p, (const char *p), (p))
SIMPLE(int, unlinkat, (f & AT_REMOVEDIR ? RMDIR : UNLINK), x, p, (int x, const char *p, int f),
       (x, p, f))
SIMPLE(int, rmdir, RMDIR, AT_FDCWD, p, (const char *p), (p))
SIMPLE(int, mkdir, MKDIR, AT_FDCWD, p, (const char *p, mode_t m), (p, m))
SIMPLE(int, mkdirat, MKDIR, x, p, (int x, const char *p, mode_t m), (x, p, m))
SIMPLE(ssize_t, writev, WRITE, fd, NULL, (int fd, const struct iovec *v, int n), (fd, v, n))
SIMPLE(ssize_t, pwritev, WRITE, fd, NULL, (int fd, const struct iovec *v, int n, off_t o),
       (fd, v, n, o))
SIMPLE(ssize_t, pwritev2, WRITE, fd, NULL,
       (int fd, const struct iovec *v, int n, off_t o, int f), (fd, v, n, o, f))

ssize_t write(int fd, const void *data, size_t count) {
    REAL(ssize_t, write, int, const void *, size_t);
    int what = before(WRITE, fd, NULL);
    if (what < 0) return -1;
    return what ? after_half(real(fd, data, half_of(count))) : real(fd, data, count);
}

#define POSITIONED(name, offset)                                                            \
    ssize_t name(int fd, const void *data, size_t count, offset at) {                      \
        REAL(ssize_t, name, int, const void *, size_t, offset);                            \
        int what = before(WRITE, fd, NULL);                                                 \
        if (what < 0) return -1;                                                            \
        return what ? after_half(real(fd, data, half_of(count), at)) : real(fd, data, count, at); \
    }

POSITIONED(pwrite, off_t)
POSITIONED(pwrite64, off64_t)

#define OPENING(name, directory, head, pass)                                   \
    int name(head const char *path, int flags, ...) {                         \
        int (*real)(head const char *, int, ...) = dlsym(RTLD_NEXT, #name);   \
        va_list rest;                                                          \
        va_start(rest, flags);                                                 \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                                          \
        if (flags & O_CREAT && before(CREATE, directory, path) < 0) return -1; \
        return real(pass path, flags, mode);                                   \
    }

#define NOTHING
#define ONE_DIRECTORY int x,
#define PASS_IT x,
OPENING(open, AT_FDCWD, NOTHING, NOTHING)
OPENING(open64, AT_FDCWD, NOTHING, NOTHING)
OPENING(openat, x, ONE_DIRECTORY, PASS_IT)
OPENING(openat64, x, ONE_DIRECTORY, PASS_IT)
