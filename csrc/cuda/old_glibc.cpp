// The static CUDA runtime, linked on a system with glibc 2.34 or newer, would need that glibc: libdl, libpthread and
// librt became part of libc there, and their functions got a new version. The older versions are the same functions.
// With the hidden symbols below, the runtime calls those, and the library also loads on an older system
// (manylinux_2_28). Each is a jump, so that the callee still sees who called: dlopen and dlsym ask.
#if defined(__linux__) && defined(__x86_64__) && defined(__LP64__)
#include <features.h>
#if defined(__GLIBC__)

__asm__(R"(
.text
.macro older function, version
  .globl \function
  .hidden \function
  .type \function, @function
  .symver older_\function, \function@GLIBC_\version
\function:
  endbr64
  jmp older_\function@PLT
  .size \function, . - \function
.endm
  older dlclose, 2.2.5
  older dlerror, 2.2.5
  older dlmopen, 2.3.4
  older dlopen, 2.2.5
  older dlsym, 2.2.5
  older dlvsym, 2.2.5
  older pthread_condattr_setpshared, 2.2.5
  older pthread_create, 2.2.5
  older pthread_detach, 2.2.5
  older pthread_getspecific, 2.2.5
  older pthread_join, 2.2.5
  older pthread_key_create, 2.2.5
  older pthread_key_delete, 2.2.5
  older pthread_kill, 2.2.5
  older pthread_mutex_trylock, 2.2.5
  older pthread_mutexattr_destroy, 2.2.5
  older pthread_mutexattr_init, 2.2.5
  older pthread_mutexattr_setpshared, 2.2.5
  older pthread_mutexattr_settype, 2.2.5
  older pthread_once, 2.2.5
  older pthread_rwlock_destroy, 2.2.5
  older pthread_rwlock_init, 2.2.5
  older pthread_rwlock_rdlock, 2.2.5
  older pthread_rwlock_timedrdlock, 2.2.5
  older pthread_rwlock_timedwrlock, 2.2.5
  older pthread_rwlock_tryrdlock, 2.2.5
  older pthread_rwlock_trywrlock, 2.2.5
  older pthread_rwlock_unlock, 2.2.5
  older pthread_rwlock_wrlock, 2.2.5
  older pthread_rwlockattr_destroy, 2.2.5
  older pthread_rwlockattr_init, 2.2.5
  older pthread_rwlockattr_setpshared, 2.2.5
  older pthread_setspecific, 2.2.5
  older pthread_spin_destroy, 2.2.5
  older pthread_spin_init, 2.2.5
  older pthread_spin_lock, 2.2.5
  older pthread_spin_trylock, 2.2.5
  older pthread_spin_unlock, 2.2.5
  older sem_destroy, 2.2.5
  older sem_init, 2.2.5
  older sem_post, 2.2.5
  older sem_timedwait, 2.2.5
  older sem_trywait, 2.2.5
  older sem_wait, 2.2.5
  older shm_open, 2.2.5
  older shm_unlink, 2.2.5
.purgem older
)");

#endif
#endif
