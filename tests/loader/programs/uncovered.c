/*
 * A program of which one system call cannot be replaced, as something jumps to it and behind it, and there is no room around. It
 * says what it found, and is 3 at its end.
 */
#include <sys/syscall.h>
#include <unistd.h>

long call_crowded(long number);
__asm__(".text\n"
        "call_crowded:\n"
        "	mov %rdi, %rax\n"
        "	xor %edi, %edi\n"
        "	jmp 2f\n"
        "	.rept 60\n"
        "	inc %rcx\n"
        "	.endr\n"
        "1:	pop %rcx\n"
        "	ret\n"
        "2:	push %rcx\n"
        "	test %rcx, %rcx\n"
        "	js 4f\n"
        "3:	syscall\n"
        "4:	cmp $-4, %rax\n"
        "	je 3b\n"
        "	jmp 1b\n"
        "	.rept 60\n"
        "	inc %rcx\n"
        "	.endr\n");

int main(void)
{
	static const char text[] = "ran\n";

	if (write(1, text, sizeof(text) - 1) != sizeof(text) - 1)
		return 1;
	return call_crowded(SYS_getpid) == getpid() ? 3 : 2;
}
