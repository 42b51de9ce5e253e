/*
 * Data among the code that looks like what the loader replaces. It is 0 at its end if all is as it was written, and a call is made.
 * With -DTABLE there is a table whose words no instruction names: they may as well be calls, so the program is refused.
 */
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

struct seen {
	uint64_t word, pair, vector[2];
	uint32_t pointer;
};

void literals_see(struct seen *seen);
__asm__(".text\n"
        ".p2align 4\n"
        "literals_see:\n"
        "	ldr w1, 1f\n"
        "	str x1, [x0]\n"
        "	ldr x1, 2f\n"
        "	str x1, [x0, #8]\n"
        "	ldr q1, 3f\n"
        "	str q1, [x0, #16]\n"
        "	ldr w1, 4f\n"
        "	str w1, [x0, #32]\n"
        "	mov x8, #172\n" /* getpid */
        "	ret\n"
        "1:	.inst 0xd4000001\n"
        "4:	.inst 0xd53bd040\n"
        "2:	.inst 0xd51bd048, 0xd4000001\n"
        "3:	.inst 0xd4000001, 0xd53bd041, 0xd4000001, 0xd51bd041\n");

#ifdef TABLE
const uint32_t *table_at(void);
__asm__(".text\n"
        "table_at:\n"
        "	mov x8, #172\n"
        "	mov x1, #0\n"
        "	adr x0, 1f\n"
        "	ret\n"
        "1:	.inst 0xd4000001\n");
#else
static const uint32_t *table_at(void)
{
	static const uint32_t table = 0xd4000001;

	return &table;
}
#endif

int main(void)
{
	static const uint32_t svc = 0xd4000001;
	struct seen seen;

	literals_see(&seen);
	if (seen.word != svc || seen.pair != 0xd4000001d51bd048 || seen.pointer != 0xd53bd040 || *table_at() != svc)
		return 1;
	if (seen.vector[0] != 0xd53bd041d4000001 || seen.vector[1] != 0xd51bd041d4000001)
		return 2;
	return syscall(SYS_getpid) == getpid() ? 0 : 3;
}
