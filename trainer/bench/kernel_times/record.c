// Records when each kernel and copy of a program ran on its GPU. The driver loads this library into every CUDA program that runs with
// CUDA_INJECTION64_PATH, so the program needs no change. Each process writes KERNEL_TIMES_OUT.PID: a line "begin end stream name" for each
// kernel, copy and fill, in nanoseconds, twice a second.
#include <cupti.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BUFFER_BYTES (4u << 20)

static FILE *out;

static void give_buffer(uint8_t **buffer, size_t *size, size_t *records_max) {
    *buffer = aligned_alloc(8, BUFFER_BYTES);
    *size = *buffer ? BUFFER_BYTES : 0;
    *records_max = 0;
}

static void write_line(uint64_t begin, uint64_t end, uint32_t stream, const char *name) {
    fprintf(out, "%llu %llu %u %s\n", (unsigned long long)begin, (unsigned long long)end, stream, name);
}

static void write_record(const CUpti_Activity *record) {
    switch (record->kind) {
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
        const CUpti_ActivityKernel10 *kernel = (const void *)record;
        write_line(kernel->start, kernel->end, kernel->streamId, kernel->name);
        break;
    }
    case CUPTI_ACTIVITY_KIND_MEMCPY: {
        const CUpti_ActivityMemcpy6 *copy = (const void *)record;
        static const char *const names[] = {"copy", "copy to GPU", "copy from GPU"};
        write_line(copy->start, copy->end, copy->streamId, names[copy->copyKind <= 2 ? copy->copyKind : 0]);
        break;
    }
    case CUPTI_ACTIVITY_KIND_MEMSET: {
        const CUpti_ActivityMemset4 *fill = (const void *)record;
        write_line(fill->start, fill->end, fill->streamId, "fill");
        break;
    }
    default:
        break;
    }
}

static void take_buffer(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
    CUpti_Activity *record = NULL;
    while (valid && cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS)
        write_record(record);
    free(buffer);
    fflush(out);
}

static void finish(void) {
    cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    fclose(out);
}

// The driver calls this when the program first uses CUDA.
int InitializeInjection(void) {
    const char *prefix = getenv("KERNEL_TIMES_OUT");
    char path[4096];
    if (!prefix || snprintf(path, sizeof path, "%s.%d", prefix, getpid()) >= (int)sizeof path || !(out = fopen(path, "w")))
        return 1;
    CUpti_ActivityKind kinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMSET};
    cuptiActivityRegisterCallbacks(give_buffer, take_buffer);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (cuptiActivityEnable(kinds[i]) != CUPTI_SUCCESS)
            fprintf(stderr, "kernel_times: CUPTI does not record kind %d\n", kinds[i]);
    // A program that is killed leaves what ran until shortly before.
    cuptiActivityFlushPeriod(500);
    atexit(finish);
    return 1;
}
