/* Every file operation below a folder, counted over all processes of a run; the N-th fails, or ends its process. Loaded by LD_PRELOAD.

   FAULTS_UNDER   the folder
   FAULTS_STATE   a file of two 64-bit numbers that all processes map: operations so far, whether the N-th has come
   FAULTS_AT      N, from 1; 0 for none
   FAULTS_HOW     an errno that the N-th operation fails with, and all after it that need room; 0: SIGKILL for the process instead
   FAULTS_LOG     a file of operations: number, process, name, path

   A write is cut in half first, as disks that fill do. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static struct { long count, come; } *state;
static char under[PATH_MAX];
static size_t length;
static long at;
static int how, log_file = -1;

__attribute__((constructor)) void faults_begin(void) {
    const char *folder = getenv("FAULTS_UNDER"), *shared = getenv("FAULTS_STATE"), *listed = getenv("FAULTS_LOG");
    state = NULL;
    if (!folder || !shared) return;
    length = strlen(strncpy(under, folder, sizeof under - 1));
    at = atol(getenv("FAULTS_AT"));
    how = atoi(getenv("FAULTS_HOW"));
    int file = syscall(SYS_openat, AT_FDCWD, shared, O_RDWR | O_CLOEXEC, 0);
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    syscall(SYS_close, file);
    log_file = listed ? syscall(SYS_openat, AT_FDCWD, listed, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600) : -1;
    if (mapped != MAP_FAILED) state = mapped;
}

static int below(int folder, const char *path) {
    char whole[2 * PATH_MAX], link[64];
    if (!state || !path) return 0;
    if (path[0] != '/') {
        snprintf(link, sizeof link, folder == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", folder);
        ssize_t got = readlink(link, whole, PATH_MAX);
        if (got < 0) return 0;
        snprintf(whole + got, PATH_MAX, "/%s", path);
        path = whole;
    }
    return !strncmp(path, under, length) && (path[length] == '/' || !path[length]);
}

static int below_file(int file) {
    char link[64], path[PATH_MAX];
    if (!state) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t got = readlink(link, path, sizeof path - 1);
    if (got < 0) return 0;
    path[got] = 0;
    return below(AT_FDCWD, path);
}

enum { PASSES, FAILS, HALF };

static int verdict(const char *name, const char *path, int needs_room, int can_be_half) {
    long number = __atomic_add_fetch(&state->count, 1, __ATOMIC_SEQ_CST);
    if (log_file >= 0) {
        char line[PATH_MAX + 64];
        int size = snprintf(line, sizeof line, "%ld %d %s %s\n", number, getpid(), name, path);
        syscall(SYS_write, log_file, line, size);
    }
    if (number == at) {
        __atomic_store_n(&state->come, 1, __ATOMIC_SEQ_CST);
        if (can_be_half) return HALF;
        if (!how) kill(getpid(), SIGKILL);
        errno = how;
        return FAILS;
    }
    if (how && __atomic_load_n(&state->come, __ATOMIC_SEQ_CST) && (needs_room || how == EROFS)) {
        errno = how;
        return FAILS;
    }
    return PASSES;
}

#define NATIVE(name) static typeof(&name) native; if (!native) native = (typeof(&name))dlsym(RTLD_NEXT, #name)
#define WRITES(flags) (((flags) & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)) && !((flags) & O_DIRECTORY && ((flags) & O_TMPFILE) != O_TMPFILE))
#define MODE(flags) va_list rest; va_start(rest, flags); mode_t mode = (flags) & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; va_end(rest)

#define OPENS(name) \
    int name(const char *path, int flags, ...) { \
        NATIVE(name); MODE(flags); \
        if (WRITES(flags) && below(AT_FDCWD, path) && verdict("open", path, 1, 0)) return -1; \
        return native(path, flags, mode); }
#define OPENS_AT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        NATIVE(name); MODE(flags); \
        if (WRITES(flags) && below(folder, path) && verdict("open", path, 1, 0)) return -1; \
        return native(folder, path, flags, mode); }
OPENS(open)
OPENS(open64)
OPENS_AT(openat)
OPENS_AT(openat64)

/* The half of a write, after which the process is gone or the disk is full. */
static ssize_t half(ssize_t done) {
    if (!how) kill(getpid(), SIGKILL);
    return done;
}

ssize_t write(int file, const void *data, size_t size) {
    NATIVE(write);
    if (below_file(file)) {
        int found = verdict("write", "", 1, size > 1);
        if (found == FAILS) return -1;
        if (found == HALF) return half(native(file, data, size / 2));
    }
    return native(file, data, size);
}

#define PWRITES(name, offset_type) \
    ssize_t name(int file, const void *data, size_t size, offset_type offset) { \
        NATIVE(name); \
        if (below_file(file)) { \
            int found = verdict("pwrite", "", 1, size > 1); \
            if (found == FAILS) return -1; \
            if (found == HALF) return half(native(file, data, size / 2, offset)); \
        } \
        return native(file, data, size, offset); }
PWRITES(pwrite, off_t)
PWRITES(pwrite64, off64_t)

ssize_t writev(int file, const struct iovec *parts, int count) {
    NATIVE(writev);
    if (below_file(file) && verdict("writev", "", 1, 0)) return -1;
    return native(file, parts, count);
}

#define ON_FILE(name, room, kind, parameters, ...) \
    kind name parameters { \
        NATIVE(name); \
        if (below_file(file) && verdict(#name, "", room, 0)) return -1; \
        return native(__VA_ARGS__); }
ON_FILE(fsync, 1, int, (int file), file)
ON_FILE(fdatasync, 1, int, (int file), file)
ON_FILE(ftruncate, 0, int, (int file, off_t size), file, size)
ON_FILE(ftruncate64, 0, int, (int file, off64_t size), file, size)

#define ON_PATH(name, room, folder, path, parameters, ...) \
    int name parameters { \
        NATIVE(name); \
        if (below(folder, path) && verdict(#name, path, room, 0)) return -1; \
        return native(__VA_ARGS__); }
ON_PATH(mkdir, 1, AT_FDCWD, path, (const char *path, mode_t mode), path, mode)
ON_PATH(mkdirat, 1, folder, path, (int folder, const char *path, mode_t mode), folder, path, mode)
ON_PATH(rename, 1, AT_FDCWD, to, (const char *from, const char *to), from, to)
ON_PATH(renameat, 1, there, to, (int here, const char *from, int there, const char *to), here, from, there, to)
ON_PATH(link, 1, AT_FDCWD, to, (const char *from, const char *to), from, to)
ON_PATH(symlink, 1, AT_FDCWD, to, (const char *from, const char *to), from, to)
ON_PATH(unlink, 0, AT_FDCWD, path, (const char *path), path)
ON_PATH(unlinkat, 0, folder, path, (int folder, const char *path, int flags), folder, path, flags)
ON_PATH(rmdir, 0, AT_FDCWD, path, (const char *path), path)
