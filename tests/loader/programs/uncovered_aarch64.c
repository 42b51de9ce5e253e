/* A program with a call that the loader does not know for one: nothing near it brings a number, or looks at what it came to. */
#include <sys/syscall.h>
#include <unistd.h>

long call_bare(long number);
__asm__(".text\n"
        "call_bare:\n"
        "	mov x8, x0\n"
        "	.rept 20\n"
        "	nop\n"
        "	.endr\n"
        "	svc #0\n"
        "	nop\n"
        "	ret\n");

int main(void)
{
	return call_bare(SYS_getpid) == getpid() ? 3 : 2;
}
