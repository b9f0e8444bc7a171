/* Which calls to the disk fail? Preloaded into a store's process by test_faults.py: the file named by FAULTS holds one
 * word (write-ENOSPC, write-EIO, short-ENOSPC, sync-EIO, read-EIO) or nothing; only files ending in .seg are touched. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static int wanted(int fd, const char *what) {
    char link[64], path[4096], word[32] = "";
    const char *file = getenv("FAULTS");
    FILE *faults = file ? fopen(file, "r") : NULL;
    if (!faults) return 0;
    if (!fgets(word, sizeof word, faults)) word[0] = 0;
    fclose(faults);
    if (strcmp(word, what)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    return length > 4 && !strncmp(path + length - 4, ".seg", 4);
}

#define REAL(name) ((__typeof__(&name)) dlsym(RTLD_NEXT, #name))

static ssize_t faulty_write(int fd, const void *bytes, size_t count, off_t offset) {
    if (wanted(fd, "write-ENOSPC")) { errno = ENOSPC; return -1; }
    if (wanted(fd, "write-EIO")) { errno = EIO; return -1; }
    if (wanted(fd, "short-ENOSPC")) {
        if (count > 4096) return REAL(pwrite64)(fd, bytes, 4096, offset);
        errno = ENOSPC;
        return -1;
    }
    return REAL(pwrite64)(fd, bytes, count, offset);
}

ssize_t pwrite(int fd, const void *bytes, size_t count, off_t offset) { return faulty_write(fd, bytes, count, offset); }
ssize_t pwrite64(int fd, const void *bytes, size_t count, off64_t offset) { return faulty_write(fd, bytes, count, offset); }

int fdatasync(int fd) {
    if (wanted(fd, "sync-EIO")) { errno = EIO; return -1; }
    return REAL(fdatasync)(fd);
}

/* Python's os.preadv calls the second version of it. */
static ssize_t faulty_read(int fd, const struct iovec *parts, int count, off64_t offset) {
    if (wanted(fd, "read-EIO")) { errno = EIO; return -1; }
    return REAL(preadv64)(fd, parts, count, offset);
}

ssize_t preadv2(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
    (void) flags;
    return faulty_read(fd, parts, count, offset);
}

ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags) {
    (void) flags;
    return faulty_read(fd, parts, count, offset);
}
