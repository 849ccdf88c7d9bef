// A stand-in for libnvidia-ml.so.1 that has one GPU, and not all functions of
// the real one. HANG and CRASH say what comes of loading it; LACKS that it has
// no function to open a GPU with; TIRES that it answers once and then hangs.
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int nvmlReturn_t;

nvmlReturn_t nvmlInit_v2(void) {
#ifdef HANG
	for (;;) pause();
#endif
#ifdef CRASH
	*(volatile int *)0 = 0;
#endif
	return 0;
}

nvmlReturn_t nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(nvmlReturn_t r) { return "an error"; }

#ifndef LACKS
nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **device) {
	if (strcmp(address, "0000:01:00.0") != 0) return 6; // not found
	*device = (void *)1;
	return 0;
}

nvmlReturn_t nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
#ifdef TIRES
	static int answers;
	if (answers++ == 1) for (;;) pause();
#endif
	strncpy(uuid, "GPU-5d2c1f01-8a41-4e0b-9c37-0b6f3d9ae401", length);
	return 0;
}

nvmlReturn_t nvmlDeviceGetIndex(void *device, unsigned *index) {
	*index = 0;
	return 0;
}

nvmlReturn_t nvmlDeviceGetName(void *device, char *name, unsigned length) {
	strncpy(name, "NVIDIA Stand-In", length);
	return 0;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(void *device, unsigned long long memory[3]) {
	memory[0] = 1ULL << 34;
	return 0;
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
	*major = 9;
	*minor = 0;
	return 0;
}
#endif
