/* A slow disk: each call that writes to a file takes SLOW_DISK_MS milliseconds more.

     cc -shared -fPIC -o slow_disk.so slow_disk.c -ldl
     SLOW_DISK_MS=20 LD_PRELOAD=./slow_disk.so COMMAND
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static void wait_for_disk(int file) {
  struct stat found;
  const char *milliseconds = getenv("SLOW_DISK_MS");
  if (milliseconds && !fstat(file, &found) && S_ISREG(found.st_mode))
    usleep(1000 * atoi(milliseconds));
}

#define SLOW(name, result, declared, given)          \
  result name declared {                             \
    static result(*real) declared;                   \
    if (!real) real = (result(*) declared)dlsym(RTLD_NEXT, #name); \
    wait_for_disk(file);                             \
    return real given;                               \
  }

SLOW(write, ssize_t, (int file, const void *data, size_t size), (file, data, size))
SLOW(pwrite, ssize_t, (int file, const void *data, size_t size, off_t at),
     (file, data, size, at))
SLOW(pwrite64, ssize_t, (int file, const void *data, size_t size, off64_t at),
     (file, data, size, at))
SLOW(writev, ssize_t, (int file, const struct iovec *parts, int count),
     (file, parts, count))
SLOW(fsync, int, (int file), (file))
SLOW(fdatasync, int, (int file), (file))
