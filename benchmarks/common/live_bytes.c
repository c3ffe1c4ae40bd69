/* Counts the bytes of large blocks that a process has allocated and not freed: tensors on the CPU, whoever makes them.
 *
 * Loaded before the C library (LD_PRELOAD), whose allocator does the work. Blocks below LEAST are not counted: they are
 * Python's objects. Sizes are what the allocator set aside, the same figure when a block comes and when it goes.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>

extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *block, size_t size);
extern void *__libc_memalign(size_t alignment, size_t size);
extern void __libc_free(void *block);

enum { LEAST = 32 * 1024 };

static atomic_long live, peak;

static size_t counted(void *block) {
  size_t size = block ? malloc_usable_size(block) : 0;
  return size >= LEAST ? size : 0;
}

static void *gained(void *block) {
  long size = (long)counted(block);
  long now = atomic_fetch_add(&live, size) + size;
  long most = atomic_load(&peak);
  while (now > most && !atomic_compare_exchange_weak(&peak, &most, now)) {
  }
  return block;
}

static void lost(void *block) { atomic_fetch_sub(&live, (long)counted(block)); }

void *malloc(size_t size) { return gained(__libc_malloc(size)); }

void *calloc(size_t count, size_t size) { return gained(__libc_calloc(count, size)); }

void *realloc(void *block, size_t size) {
  lost(block);
  void *moved = __libc_realloc(block, size);
  if (!moved && size) gained(block); /* it stays where it was */
  return gained(moved);
}

void *memalign(size_t alignment, size_t size) { return gained(__libc_memalign(alignment, size)); }

void *aligned_alloc(size_t alignment, size_t size) { return gained(__libc_memalign(alignment, size)); }

int posix_memalign(void **block, size_t alignment, size_t size) {
  void *made = gained(__libc_memalign(alignment, size));
  if (!made) return ENOMEM;
  *block = made;
  return 0;
}

void free(void *block) {
  lost(block);
  __libc_free(block);
}

long live_bytes(void) { return atomic_load(&live); }

/* The most since it was asked last. */
long peak_bytes(void) { return atomic_exchange(&peak, atomic_load(&live)); }
