/* A program that sets the base of %gs, in which the loader keeps its own, and reads by it; 4 at its end. */
#include <asm/prctl.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(void)
{
	static char bytes[64] = {[16] = 42};
	int found;

	if (syscall(SYS_arch_prctl, ARCH_SET_GS, bytes) != 0)
		return 5;
	__asm__ volatile("movzbl %%gs:16, %0" : "=r"(found));
	printf("found %d\n", found);
	return 4;
}
