/* Stands between a process and the C library (LD_PRELOAD) and sees every call that changes a file below one folder.
 *
 * Nothing happens until chaos_arm() is called. Then each such call gets the next number, from any thread, and
 *   'c'  all are made, and written to a journal with their data: to count them, and to model a power cut;
 *   'k'  the process is killed before call `at`;
 *   't'  the same, but if it is a write, half of it is made before (a torn write);
 *   'e'  call `at` fails with `error`, all others are made;
 *   'f'  call `at` and all later ones that need room (create, write, mkdir, flush) fail with `error`: a full disk.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX];
static size_t folder_length;
static int journal = -1;
static char mode;
static long at, calls;
static int error_number;
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;


void chaos_arm(const char *below, const char *journal_file, int how, long number, int error) {
  folder_length = strlen(below);
  memcpy(folder, below, folder_length + 1);
  journal = journal_file && *journal_file ? (int)syscall(SYS_openat, AT_FDCWD, journal_file, O_WRONLY | O_CREAT | O_TRUNC, 0600) : -1;
  at = number;
  error_number = error;
  calls = 0;
  mode = (char)how;
}

long chaos_calls(void) { return calls; }

static int below(const char *path) {
  return mode && !strncmp(path, folder, folder_length) && (path[folder_length] == '/' || !path[folder_length]);
}

/* The absolute path of a name relative to a folder's descriptor. Links in between are not followed: none are ours. */
static int absolute(int at_fd, const char *name, char *path) {
  char base[PATH_MAX / 2] = "";
  if (!mode || !name) return 0;
  if (name[0] != '/') {
    if (at_fd == AT_FDCWD) {
      if (!getcwd(base, sizeof base)) return 0;
    } else {
      char link[64];
      snprintf(link, sizeof link, "/proc/self/fd/%d", at_fd);
      ssize_t n = readlink(link, base, sizeof base - 1);
      if (n < 0) return 0;
      base[n] = 0;
    }
    snprintf(path, PATH_MAX, "%s/%s", base, name);
  } else {
    snprintf(path, PATH_MAX, "%s", name);
  }
  for (size_t n = strlen(path); n > 1 && path[n - 1] == '/'; n--) path[n - 1] = 0;
  return below(path);
}

static int of_descriptor(int fd, char *path) {
  char link[64];
  if (!mode || fd == journal) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, PATH_MAX - 1);
  if (n < 0) return 0;
  path[n] = 0;
  return below(path);
}

static void put(const void *data, size_t n) {
  while (n) {
    ssize_t done = syscall(SYS_write, journal, data, n);
    if (done <= 0) abort();
    data = (const char *)data + done;
    n -= (size_t)done;
  }
}

/* One line of the journal: what, path, other path or number, bytes of data that follow. */
static void note(const char *what, const char *path, const char *other, const void *data, size_t n) {
  char head[2 * PATH_MAX + 64];
  if (journal < 0) return;
  int length = snprintf(head, sizeof head, "%s\t%s\t%s\t%zu\n", what, path, other, n);
  put(head, (size_t)length);
  put(data, n);
}

/* Counts a call; 1 if it is to fail. Dies here if it is its turn. */
static int strike(int needs_room, int fd, const void *data, size_t n) {
  calls++;
  if ((mode == 'k' || mode == 't') && calls == at) {
    if (mode == 't' && data && n > 1) syscall(SYS_write, fd, data, n / 2);
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
  }
  if ((mode == 'e' && calls == at) || (mode == 'f' && calls >= at && needs_room)) {
    errno = error_number;
    return 1;
  }
  return 0;
}

static int opened(int at_fd, const char *name, int flags, mode_t permissions) {
  char path[PATH_MAX];
  struct stat found;
  if (!(flags & (O_CREAT | O_TRUNC)) || (flags & O_TMPFILE) == O_TMPFILE || !absolute(at_fd, name, path))
    return (int)syscall(SYS_openat, at_fd, name, flags, permissions);
  int there = fstatat(AT_FDCWD, path, &found, AT_SYMLINK_NOFOLLOW) == 0;
  if (there && !((flags & O_TRUNC) && found.st_size)) return (int)syscall(SYS_openat, at_fd, name, flags, permissions);
  pthread_mutex_lock(&lock);
  int fd = -1;
  if (!strike(1, -1, NULL, 0)) {
    fd = (int)syscall(SYS_openat, at_fd, name, flags, permissions);
    if (fd >= 0) note(there ? "truncate" : "create", path, "0", NULL, 0);
  }
  pthread_mutex_unlock(&lock);
  return fd;
}

#define PERMISSIONS                                        \
  mode_t permissions = 0;                                  \
  if (flags & (O_CREAT | O_TMPFILE)) {                     \
    va_list more;                                          \
    va_start(more, flags);                                 \
    permissions = va_arg(more, mode_t);                    \
    va_end(more);                                          \
  }

int open(const char *name, int flags, ...) { PERMISSIONS return opened(AT_FDCWD, name, flags, permissions); }
int open64(const char *name, int flags, ...) { PERMISSIONS return opened(AT_FDCWD, name, flags | O_LARGEFILE, permissions); }
int openat(int at_fd, const char *name, int flags, ...) { PERMISSIONS return opened(at_fd, name, flags, permissions); }
int openat64(int at_fd, const char *name, int flags, ...) { PERMISSIONS return opened(at_fd, name, flags | O_LARGEFILE, permissions); }
int creat(const char *name, mode_t permissions) { return opened(AT_FDCWD, name, O_WRONLY | O_CREAT | O_TRUNC, permissions); }
int creat64(const char *name, mode_t permissions) { return creat(name, permissions); }

static ssize_t written(int fd, const void *data, size_t n, off_t where, int positioned) {
  char path[PATH_MAX], place[32];
  if (!of_descriptor(fd, path)) return positioned ? syscall(SYS_pwrite64, fd, data, n, where) : syscall(SYS_write, fd, data, n);
  pthread_mutex_lock(&lock);
  ssize_t done = -1;
  if (!strike(1, fd, data, n)) {
    off_t begin = positioned ? where : fcntl(fd, F_GETFL) & O_APPEND ? lseek(fd, 0, SEEK_END) : lseek(fd, 0, SEEK_CUR);
    done = positioned ? syscall(SYS_pwrite64, fd, data, n, where) : syscall(SYS_write, fd, data, n);
    snprintf(place, sizeof place, "%lld", (long long)begin);
    if (done > 0) note("write", path, place, data, (size_t)done);
  }
  pthread_mutex_unlock(&lock);
  return done;
}

ssize_t write(int fd, const void *data, size_t n) { return written(fd, data, n, 0, 0); }
ssize_t pwrite(int fd, const void *data, size_t n, off_t where) { return written(fd, data, n, where, 1); }
ssize_t pwrite64(int fd, const void *data, size_t n, off_t where) { return written(fd, data, n, where, 1); }

ssize_t writev(int fd, const struct iovec *pieces, int count) {
  ssize_t total = 0;
  char path[PATH_MAX];
  if (!of_descriptor(fd, path)) return syscall(SYS_writev, fd, pieces, count);
  for (int i = 0; i < count; i++) {
    ssize_t done = pieces[i].iov_len ? written(fd, pieces[i].iov_base, pieces[i].iov_len, 0, 0) : 0;
    if (done < 0) return total ? total : -1;
    total += done;
    if ((size_t)done < pieces[i].iov_len) break;
  }
  return total;
}

/* Calls with one path, or two, or a descriptor: `make` is the call itself. */
#define CHANGE(needs_room, what, one, other, make) \
  pthread_mutex_lock(&lock);                       \
  int result = -1;                                 \
  if (!strike(needs_room, -1, NULL, 0)) {          \
    result = make;                                 \
    if (!result) note(what, one, other, NULL, 0);  \
  }                                                \
  pthread_mutex_unlock(&lock);                     \
  return result;

static int renamed(int from_fd, const char *from, int to_fd, const char *to, unsigned flags) {
  char one[PATH_MAX], two[PATH_MAX];
  int a = absolute(from_fd, from, one), b = absolute(to_fd, to, two);
  if (!a && !b) return (int)syscall(SYS_renameat2, from_fd, from, to_fd, to, flags);
  CHANGE(0, "rename", one, two, (int)syscall(SYS_renameat2, from_fd, from, to_fd, to, flags))
}

int rename(const char *from, const char *to) { return renamed(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int from_fd, const char *from, int to_fd, const char *to) { return renamed(from_fd, from, to_fd, to, 0); }
int renameat2(int from_fd, const char *from, int to_fd, const char *to, unsigned flags) {
  return renamed(from_fd, from, to_fd, to, flags);
}

static int removed(int at_fd, const char *name, int flags) {
  char path[PATH_MAX];
  struct stat found;
  if (!absolute(at_fd, name, path) || fstatat(AT_FDCWD, path, &found, AT_SYMLINK_NOFOLLOW))
    return (int)syscall(SYS_unlinkat, at_fd, name, flags); /* it is not there: nothing changes */
  CHANGE(0, "remove", path, "", (int)syscall(SYS_unlinkat, at_fd, name, flags))
}

int unlink(const char *name) { return removed(AT_FDCWD, name, 0); }
int unlinkat(int at_fd, const char *name, int flags) { return removed(at_fd, name, flags); }
int rmdir(const char *name) { return removed(AT_FDCWD, name, AT_REMOVEDIR); }

static int made(int at_fd, const char *name, mode_t permissions) {
  char path[PATH_MAX];
  struct stat found;
  if (!absolute(at_fd, name, path) || !fstatat(AT_FDCWD, path, &found, AT_SYMLINK_NOFOLLOW))
    return (int)syscall(SYS_mkdirat, at_fd, name, permissions);
  CHANGE(1, "mkdir", path, "", (int)syscall(SYS_mkdirat, at_fd, name, permissions))
}

int mkdir(const char *name, mode_t permissions) { return made(AT_FDCWD, name, permissions); }
int mkdirat(int at_fd, const char *name, mode_t permissions) { return made(at_fd, name, permissions); }

static int cut(int fd, off_t length) {
  char path[PATH_MAX], place[32];
  if (!of_descriptor(fd, path)) return (int)syscall(SYS_ftruncate, fd, length);
  snprintf(place, sizeof place, "%lld", (long long)length);
  CHANGE(1, "truncate", path, place, (int)syscall(SYS_ftruncate, fd, length))
}

int ftruncate(int fd, off_t length) { return cut(fd, length); }
int ftruncate64(int fd, off_t length) { return cut(fd, length); }

static int flushed(int fd, long call) {
  char path[PATH_MAX];
  if (!of_descriptor(fd, path)) {
    int result = (int)syscall(call, fd);
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = mode ? readlink(link, path, PATH_MAX - 1) : -1;
    if (n > 0) path[n] = 0, note("sync", path, "", NULL, 0); /* of the folder above: it names ours */
    return result;
  }
  CHANGE(1, "sync", path, "", (int)syscall(call, fd))
}

int fsync(int fd) { return flushed(fd, SYS_fsync); }
int fdatasync(int fd) { return flushed(fd, SYS_fdatasync); }
