/* A CUDA runtime and driver whose GPUs do nothing, for tests on machines without a GPU.

   Preloaded (LD_PRELOAD) under the name of the driver, libcuda.so.1, it stands before the libcudart that torch's CUDA
   build links. Streams, events, allocations and copies are real as far as torch can tell; kernels do not run. So what
   was copied to new memory can be read again, and what a kernel would have written there is 0: without torch's caching
   allocator all memory is new, and with STUB_CUDA_BLANK set nothing is copied to a device. A host that touches a
   device's memory by its pointer dies of SIGSEGV. A function that is missing here is libcudart's own, which says "CUDA
   driver version is insufficient", or libcublas's own, which says CUBLAS_STATUS_NOT_INITIALIZED.

   Signatures: cuda_runtime_api.h of CUDA 13; what takes no notice of its arguments is declared without any. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define OK 0
#define OUT_OF_MEMORY 2
#define INVALID_DEVICE 101
#define DEVICE_TO_HOST 2
#define TOTAL ((size_t)80 << 30)
#define VERSION 13020

#define DOES_NOTHING(name) int name() { return OK; }
#define GIVES(name, type, value) int name(type *found) { *found = (value); return OK; }
#define GIVES_HANDLE(name) int name(void **found) { *found = (void *)(next_handle += 64); return OK; }

static uintptr_t next_handle = 1 << 20;
static __thread int current;

static int devices(void) {
    const char *number = getenv("STUB_CUDA_DEVICES");
    return number ? atoi(number) : 1;
}

/* ---------------------------------------------------------------- devices */

GIVES(cudaGetDeviceCount, int, devices())
GIVES(cudaGetDevice, int, current)
GIVES(cudaDriverGetVersion, int, VERSION)
GIVES(cudaRuntimeGetVersion, int, VERSION)
int cudaSetDevice(int device) {
    if (device < 0 || device >= devices()) return INVALID_DEVICE;
    current = device;
    return OK;
}
int cudaDeviceGetAttribute(int *value, int attribute, int device) { *value = 1; return OK; }
int cudaDeviceCanAccessPeer(int *can, int from, int to) { *can = 0; return OK; }
int cudaDeviceGetPCIBusId(char *id, int length, int device) { strncpy(id, "0000:00:00.0", length); return OK; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return OK;
}
/* An H100, at the offsets of struct cudaDeviceProp. */
int cudaGetDeviceProperties(char *p, int device) {
    memset(p, 0, 1008);
    strcpy(p, "stub");
    *(size_t *)(p + 288) = TOTAL;        /* totalGlobalMem */
    *(size_t *)(p + 296) = 49152;        /* sharedMemPerBlock */
    *(int *)(p + 304) = 65536;           /* regsPerBlock */
    *(int *)(p + 308) = 32;              /* warpSize */
    *(int *)(p + 320) = 1024;            /* maxThreadsPerBlock */
    for (int i = 0; i < 3; i++) {
        ((int *)(p + 324))[i] = 1024;    /* maxThreadsDim */
        ((int *)(p + 336))[i] = 65535;   /* maxGridSize */
    }
    *(int *)(p + 360) = 9;               /* major, minor */
    *(int *)(p + 384) = 132;             /* multiProcessorCount */
    *(int *)(p + 604) = 2048;            /* maxThreadsPerMultiProcessor */
    *(size_t *)(p + 624) = 233472;       /* sharedMemPerMultiprocessor */
    *(size_t *)(p + 672) = 232448;       /* sharedMemPerBlockOptin */
    return OK;
}
DOES_NOTHING(cudaDeviceSynchronize)
DOES_NOTHING(cudaDeviceEnablePeerAccess)
DOES_NOTHING(cudaGetLastError)
DOES_NOTHING(cudaPeekAtLastError)
DOES_NOTHING(cudaProfilerStart)
DOES_NOTHING(cudaProfilerStop)

/* ---------------------------------------------------------------- streams and events */

GIVES_HANDLE(cudaStreamCreate)
GIVES_HANDLE(cudaStreamCreateWithFlags)
GIVES_HANDLE(cudaStreamCreateWithPriority)
GIVES_HANDLE(cudaEventCreate)
GIVES_HANDLE(cudaEventCreateWithFlags)
DOES_NOTHING(cudaStreamDestroy)
DOES_NOTHING(cudaStreamQuery)
DOES_NOTHING(cudaStreamSynchronize)
DOES_NOTHING(cudaStreamWaitEvent)
DOES_NOTHING(cudaEventDestroy)
DOES_NOTHING(cudaEventQuery)
DOES_NOTHING(cudaEventRecord)
DOES_NOTHING(cudaEventRecordWithFlags)
DOES_NOTHING(cudaEventSynchronize)
DOES_NOTHING(cudaThreadExchangeStreamCaptureMode)
int cudaStreamGetPriority(void *stream, int *priority) { *priority = 0; return OK; }
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return OK; }
int cudaStreamGetCaptureInfo(void *stream, int *status) { *status = 0; return OK; }
int cudaEventElapsedTime(float *milliseconds, void *start, void *end) { *milliseconds = 1; return OK; }
int cudaLaunchHostFunc(void *stream, void (*call)(void *), void *data) { call(data); return OK; }

/* ---------------------------------------------------------------- memory */

/* Addresses that torch sees are those of the memory without this bit, which all of a Linux process's have. */
#define BIT ((uintptr_t)1 << 46)
#define ON_HOST(address) ((void *)((uintptr_t)(address) | BIT))
#define ON_DEVICE(address) ((void *)((uintptr_t)(address) & ~BIT))

int cudaMalloc(void **found, size_t bytes) {
    if (!bytes) return *found = NULL, OK;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *found = ON_DEVICE(memory);
    return memory == MAP_FAILED ? OUT_OF_MEMORY : OK;
}
DOES_NOTHING(cudaFree) /* addresses are many */
int cudaMemGetInfo(size_t *left, size_t *total) { *left = *total = TOTAL; return OK; }

static struct { char *start; size_t bytes; } pinned[1 << 16];
static int pins;

int cudaHostAlloc(void **found, size_t bytes, unsigned flags) {
    if (pins == 1 << 16 || posix_memalign(found, 4096, bytes)) return OUT_OF_MEMORY;
    pinned[pins].start = *found;
    pinned[pins++].bytes = bytes;
    return OK;
}
int cudaMallocHost(void **found, size_t bytes) { return cudaHostAlloc(found, bytes, 0); }
int cudaFreeHost(void *start) {
    for (int i = 0; i < pins; i++)
        if (pinned[i].start == start) pinned[i].bytes = 0;
    free(start);
    return OK;
}
struct attributes { int type, device; void *on_device, *on_host; };
int cudaPointerGetAttributes(struct attributes *found, const char *address) {
    memset(found, 0, sizeof *found); /* of memory that CUDA does not know */
    for (int i = 0; i < pins; i++)
        if (address >= pinned[i].start && address < pinned[i].start + pinned[i].bytes) found->type = 1; /* host */
    return OK;
}
int cudaMemcpy(void *to, const void *from, size_t bytes, int kind) {
    if (kind == DEVICE_TO_HOST || !getenv("STUB_CUDA_BLANK")) memcpy(ON_HOST(to), ON_HOST(from), bytes);
    return OK;
}
int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    return cudaMemcpy(to, from, bytes, kind);
}
DOES_NOTHING(cudaMemcpyPeerAsync)
DOES_NOTHING(cudaMemset)
DOES_NOTHING(cudaMemsetAsync)

/* ---------------------------------------------------------------- kernels and libraries */

DOES_NOTHING(cudaLaunchKernel)
DOES_NOTHING(cudaLaunchKernelExC)
DOES_NOTHING(__cudaLaunchKernel)
DOES_NOTHING(__cudaPushCallConfiguration)
DOES_NOTHING(__cudaPopCallConfiguration)
DOES_NOTHING(cudaFuncSetAttribute)
GIVES_HANDLE(__cudaGetKernel)
int cudaFuncGetAttributes(void *found, const void *kernel) { memset(found, 0, 128); return OK; }
GIVES(cudaOccupancyMaxActiveBlocksPerMultiprocessor, int, 1)
GIVES(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, int, 1)
static void *binary;
void **__cudaRegisterFatBinary(void *from) { return &binary; }
void __cudaRegisterFatBinaryEnd() {}
void __cudaUnregisterFatBinary() {}
void __cudaRegisterFunction() {}
void __cudaRegisterVar() {}

GIVES(cublasCreate_v2, void *, NULL) /* of a handle that is not NULL libcublas would read what it points to */
GIVES(cublasLtCreate, void *, NULL)
DOES_NOTHING(cublasDestroy_v2)
DOES_NOTHING(cublasSetStream_v2)
DOES_NOTHING(cublasSetWorkspace_v2)
DOES_NOTHING(cublasSetMathMode)
DOES_NOTHING(cublasSetPointerMode_v2)
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return OK; }
int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return OK; }
DOES_NOTHING(cublasSdot_v2)
DOES_NOTHING(cublasDdot_v2)
DOES_NOTHING(cublasSgemm_v2)
DOES_NOTHING(cublasCgemm_v2)
DOES_NOTHING(cublasCgemm3m)
DOES_NOTHING(cublasGemmEx)
DOES_NOTHING(cublasSgemmStridedBatched)
DOES_NOTHING(cublasCgemmStridedBatched)
DOES_NOTHING(cublasGemmStridedBatchedEx)
DOES_NOTHING(cublasLtMatmul)
int cublasLtMatmulAlgoGetHeuristic(void *a, void *b, void *c, void *d, void *e, void *f, void *g, int asked, void *found,
                                   int *number) {
    *number = 1;
    return OK;
}
GIVES_HANDLE(cufftCreate)
DOES_NOTHING(cufftDestroy)
DOES_NOTHING(cufftSetAutoAllocation)
DOES_NOTHING(cufftSetStream)
DOES_NOTHING(cufftSetWorkArea)
DOES_NOTHING(cufftXtMakePlanMany)
DOES_NOTHING(cufftXtExec)

/* ---------------------------------------------------------------- the driver, libcuda */

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return OK; }
GIVES_HANDLE(cuCtxGetCurrent)
int cuGetErrorString(int error, const char **text) { *text = "an error of the stub"; return OK; }
static int does_nothing(void) { return OK; }
int cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, uint64_t flags, int *status) {
    *found = strcmp(name, "cuDevicePrimaryCtxGetState") ? (void *)does_nothing : (void *)cuDevicePrimaryCtxGetState;
    if (status) *status = OK;
    return OK;
}
