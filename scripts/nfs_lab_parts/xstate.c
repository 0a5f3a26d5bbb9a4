/* User Mode Linux 6.1 on CPUs with AMX: a library to preload under it. Built and used by scripts/nfs_lab.
 *
 * UML keeps 2,696 bytes of extended CPU state per task, which holds all up to AVX-512 and PKRU. The host's kernel takes
 * a state (PTRACE_SETREGSET of NT_X86_XSTATE) only in its own full size, and with AMX that is about 11,000 bytes: UML
 * ends with "ptrace set fp regs failed, errno = 14". Here the state is filled up to the host's size. What UML does not
 * keep is marked as unused, so nobody's registers leak into another's; guests can't use AMX anyway, since UML's
 * arch_prctl grants no permission for it.
 */
#define _GNU_SOURCE
#include <elf.h>
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef NT_X86_XSTATE
#define NT_X86_XSTATE 0x202
#endif

enum {
    XSTATE_BV = 512,        /* offset of the bit mask of the parts in use, in the standard format */
    KEPT_BY_UML = 0x2ff,    /* x87, SSE, AVX, MPX, AVX-512, PKRU */
    LARGEST_STATE = 65536,
};

static long set_padded(long pid, const struct iovec *given)
{
    static _Alignas(64) uint8_t state[LARGEST_STATE];
    static size_t full;
    uint64_t used;
    struct iovec padded = { state, sizeof(state) };

    if (full == 0) {
        if (syscall(SYS_ptrace, PTRACE_GETREGSET, pid, (void *)NT_X86_XSTATE, &padded) != 0)
            return -1;
        full = padded.iov_len;
        memset(state, 0, sizeof(state));
    }
    if (given->iov_len >= full || given->iov_len < XSTATE_BV + sizeof(used))
        return syscall(SYS_ptrace, PTRACE_SETREGSET, pid, (void *)NT_X86_XSTATE, given);
    memcpy(state, given->iov_base, given->iov_len);
    memcpy(&used, state + XSTATE_BV, sizeof(used));
    used &= KEPT_BY_UML;
    memcpy(state + XSTATE_BV, &used, sizeof(used));
    padded.iov_len = full;
    return syscall(SYS_ptrace, PTRACE_SETREGSET, pid, (void *)NT_X86_XSTATE, &padded);
}

/* Takes the place of libc's ptrace(), whose peeking requests return what was read. */
long ptrace(enum __ptrace_request request, ...)
{
    va_list arguments;
    va_start(arguments, request);
    long pid = va_arg(arguments, pid_t);
    void *address = va_arg(arguments, void *);
    void *data = va_arg(arguments, void *);
    va_end(arguments);

    if (request == PTRACE_SETREGSET && (long)address == NT_X86_XSTATE)
        return set_padded(pid, data);
    if (request == PTRACE_PEEKTEXT || request == PTRACE_PEEKDATA || request == PTRACE_PEEKUSER) {
        long word;
        if (syscall(SYS_ptrace, request, pid, address, &word) < 0)
            return -1;
        errno = 0;
        return word;
    }
    return syscall(SYS_ptrace, request, pid, address, data);
}
