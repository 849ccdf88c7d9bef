// Adds two vectors of 32 MiB on the first GPU, checks each element, and prints the GPU's UUID and
// the sum. With the argument "wait", it goes on to compute and prints the number of completed
// steps, until SIGTERM.
#include <csignal>
#include <cstdio>
#include <cstring>
#include <cuda_runtime.h>
#include <unistd.h>
#include <vector>

static volatile sig_atomic_t ended;

static void end(int) { ended = 1; }

static bool failed(const char *step, cudaError_t error) {
	if (error != cudaSuccess)
		fprintf(stderr, "%s: %s\n", step, cudaGetErrorString(error));
	return error != cudaSuccess;
}

__global__ void add(const float *a, float *b, int n) {
	int i = blockIdx.x * blockDim.x + threadIdx.x;
	if (i < n)
		b[i] += a[i];
}

int main(int argc, char **argv) {
	const int n = 8 << 20, threads = 256;
	const size_t size = n * sizeof(float);
	signal(SIGTERM, end);
	setvbuf(stdout, nullptr, _IOLBF, 0);

	cudaDeviceProp device;
	int count = 0;
	if (failed("count devices", cudaGetDeviceCount(&count)) || failed("device", cudaGetDeviceProperties(&device, 0)))
		return 1;
	printf("devices %d\nuuid GPU-", count);
	for (int i = 0; i < 16; i++)
		printf(i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", (unsigned char)device.uuid.bytes[i]);
	printf("\n");

	std::vector<float> a(n), b(n, 1);
	for (int i = 0; i < n; i++)
		a[i] = i % 1000;
	float *onDeviceA, *onDeviceB;
	if (failed("allocate", cudaMalloc(&onDeviceA, size)) || failed("allocate", cudaMalloc(&onDeviceB, size)) ||
		failed("copy", cudaMemcpy(onDeviceA, a.data(), size, cudaMemcpyHostToDevice)) ||
		failed("copy", cudaMemcpy(onDeviceB, b.data(), size, cudaMemcpyHostToDevice)))
		return 1;
	add<<<(n + threads - 1) / threads, threads>>>(onDeviceA, onDeviceB, n);
	if (failed("add", cudaGetLastError()) || failed("copy back", cudaMemcpy(b.data(), onDeviceB, size, cudaMemcpyDeviceToHost)))
		return 1;
	double sum = 0;
	for (int i = 0; i < n; i++) {
		if (b[i] != a[i] + 1) {
			fprintf(stderr, "element %d is %g instead of %g\n", i, b[i], a[i] + 1);
			return 1;
		}
		sum += b[i];
	}
	printf("sum %.0f\n", sum);

	for (int step = 1; argc > 1 && !strcmp(argv[1], "wait") && !ended; step++) {
		for (int i = 0; i < 100; i++)
			add<<<(n + threads - 1) / threads, threads>>>(onDeviceA, onDeviceB, n);
		if (failed("step", cudaDeviceSynchronize()))
			return 1;
		printf("step %d\n", step);
		usleep(200000);
	}
	return 0;
}
