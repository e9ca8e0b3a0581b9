// A fake of libnccl.so.2 for tests without GPUs: the functions of our table, for processes of one machine whose device is the fake driver
// (kernels/tests/gpu/fake/driver.cc).
//
// Like NCCL's kernels, an operation waits for its peers without a limit when its turn on the stream comes; only an abort ends it. An aborted
// operation leaves arbitrary bytes in memory on purpose.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <functional>
#include <sched.h>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

// A function of the fake driver.
extern "C" int fake_enqueue(size_t stream, unsigned long long address, size_t bytes, void (*run)(void *), void *argument);

namespace {

enum { INVALID_ARGUMENT = 4, SYSTEM_ERROR = 2 };
enum { U8 = 1, FP16 = 6, FP32 = 7, FP64 = 8, BF16 = 9 };
const int RANKS_MAX = 8;
const size_t SLOT_BYTES = size_t(1) << 20;

struct Id {
    char path[128];
};

// One file, mapped by all ranks: the number of steps that each has completed, and a slot of bytes for each.
struct Meeting {
    std::atomic<uint64_t> steps[RANKS_MAX];
    alignas(64) unsigned char slot[RANKS_MAX][SLOT_BYTES];
};

struct Comm {
    Meeting *meeting;
    int rank, ranks;
    uint64_t steps = 0;
    std::atomic<bool> aborted{false};
};

// Waits until all ranks have completed as many steps as this one. Returns false after an abort.
bool step(Comm *comm) {
    comm->meeting->steps[comm->rank] = ++comm->steps;
    for (int rank = 0; rank < comm->ranks; rank++)
        while (comm->meeting->steps[rank] < comm->steps) {
            if (comm->aborted) return false;
            sched_yield();
        }
    return !comm->aborted;
}

size_t width(int type) { return type == U8 ? 1 : type == FP64 ? 8 : type == FP32 ? 4 : 2; }

float from_half(uint16_t bits) {
    int exponent = bits >> 10 & 31;
    float fraction = (bits & 1023) / 1024.0f;
    float value = exponent == 0 ? fraction * 0x1p-14f : (1 + fraction) * __builtin_ldexpf(1, exponent - 15);
    return bits & 0x8000 ? -value : value;
}
// Converts exactly representable numbers only, as the tests use.
uint16_t to_half(float value) {
    uint16_t sign = value < 0 ? 0x8000 : 0;
    value = __builtin_fabsf(value);
    if (value == 0) return sign;
    int exponent = __builtin_ilogbf(value);
    return sign | uint16_t(exponent + 15) << 10 | uint16_t((value / __builtin_ldexpf(1, exponent) - 1) * 1024);
}
double get(int type, const unsigned char *at) {
    uint16_t half;
    uint32_t word;
    float single;
    double wide;
    switch (type) {
        case FP64: return memcpy(&wide, at, 8), wide;
        case FP32: return memcpy(&single, at, 4), single;
        case FP16: return memcpy(&half, at, 2), from_half(half);
        default: return memcpy(&half, at, 2), word = uint32_t(half) << 16, memcpy(&single, &word, 4), single;
    }
}
void put(int type, unsigned char *at, double value) {
    float single = float(value);
    uint32_t word;
    uint16_t half;
    switch (type) {
        case FP64: memcpy(at, &value, 8); break;
        case FP32: memcpy(at, &single, 4); break;
        case FP16: half = to_half(single), memcpy(at, &half, 2); break;
        default: memcpy(&word, &single, 4), half = uint16_t(word >> 16), memcpy(at, &half, 2);
    }
}

enum Kind { GATHER, SCATTER, REDUCE, EXCHANGE };

struct Operation {
    Comm *comm;
    Kind kind;
    unsigned char *from, *to;
    size_t count;
    int type;

    // Every rank publishes a piece of its input, then every rank reads all pieces.
    bool pieces(size_t bytes, const std::function<const unsigned char *(size_t)> &input,
                const std::function<void(int, size_t, const unsigned char *, size_t)> &see) {
        for (size_t start = 0; start < bytes; start += SLOT_BYTES) {
            size_t length = bytes - start < SLOT_BYTES ? bytes - start : SLOT_BYTES;
            memcpy(comm->meeting->slot[comm->rank], input(start), length);
            if (!step(comm)) return false;
            for (int rank = 0; rank < comm->ranks; rank++) see(rank, start, comm->meeting->slot[rank], length);
            if (!step(comm)) return false;
        }
        return true;
    }

    // Every rank publishes a piece of its part for each other rank in turn.
    bool exchange() {
        size_t bytes = count * width(type);
        bool done = true;
        for (int to_rank = 0; to_rank < comm->ranks && done; to_rank++)
            done = pieces(
                bytes, [&](size_t start) { return from + to_rank * bytes + start; },
                [&](int rank, size_t start, const unsigned char *piece, size_t length) {
                    if (to_rank == comm->rank) memcpy(to + rank * bytes + start, piece, length);
                });
        if (!done) memset(to, 0xEE, bytes * comm->ranks);
        return done;
    }

    void run() {
        if (kind == EXCHANGE) return (void)exchange();
        size_t bytes = count * width(type), all = bytes * (kind == SCATTER ? comm->ranks : 1);
        std::vector<double> sums(kind == GATHER ? 0 : all / width(type));
        // A copy, because the result may overlap the input.
        std::vector<unsigned char> input(from, from + all);
        bool done = pieces(
            all, [&](size_t start) { return input.data() + start; },
            [&](int rank, size_t start, const unsigned char *piece, size_t length) {
                if (kind == GATHER) return (void)memcpy(to + rank * bytes + start, piece, length);
                for (size_t i = 0; i < length; i += width(type)) sums[(start + i) / width(type)] += get(type, piece + i);
            });
        size_t first = kind == SCATTER ? comm->rank * count : 0;
        for (size_t i = 0; kind != GATHER && i < count; i++) put(type, to + i * width(type), sums[first + i]);
        if (!done) memset(to, 0xEE, bytes);
    }
};

int enqueue(Operation operation, size_t result_bytes, size_t stream) {
    if (operation.comm->aborted) return INVALID_ARGUMENT;
    auto run = [](void *argument) {
        auto *operation = static_cast<Operation *>(argument);
        operation->run();
        delete operation;
    };
    auto address = reinterpret_cast<unsigned long long>(operation.to);
    return fake_enqueue(stream, address, result_bytes, run, new Operation(operation)) ? INVALID_ARGUMENT : 0;
}

unsigned char *at(unsigned long long address) { return reinterpret_cast<unsigned char *>(address); }
Comm *comm_of(size_t handle) { return reinterpret_cast<Comm *>(handle); }

// Sends and receives between ncclGroupStart and ncclGroupEnd, of which a thread makes one group at a time: one part for each rank.
struct Group {
    size_t sends = 0, receives = 0, count = 0, stream = 0, comm = 0;
    unsigned long long from = 0, to = 0;
    int type = 0;
    bool open = false, wrong = false;
};
thread_local Group group;

// Adds part `peer` of a buffer, which begins at `first`, to the group.
int add(unsigned long long &first, size_t &parts, unsigned long long address, size_t count, int type, int peer, size_t comm,
        size_t stream) {
    unsigned long long begin = address - peer * count * width(type);
    bool fits = group.open && (parts == 0 || begin == first) && (group.comm == 0 || (group.comm == comm && group.stream == stream)) &&
                (group.count == 0 || (group.count == count && group.type == type));
    if (!fits) return group.wrong = true, INVALID_ARGUMENT;
    first = begin, parts++;
    group.count = count, group.type = type, group.comm = comm, group.stream = stream;
    return 0;
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

API int ncclGetVersion(int *version) { return *version = 22809, 0; }
API const char *ncclGetErrorString(int) { return "an error of the fake driver"; }
API int ncclGetUniqueId(Id *id) {
    const char *folder = getenv("KERNELS_FAKE");
    snprintf(id->path, sizeof id->path, "%s/meeting-%d", folder ? folder : ".", getpid());
    int file = open(id->path, O_CREAT | O_EXCL | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, sizeof(Meeting))) return SYSTEM_ERROR;
    return close(file), 0;
}
API int ncclCommInitRank(size_t *handle, int ranks, Id id, int rank) {
    if (ranks > RANKS_MAX || rank >= ranks) return INVALID_ARGUMENT;
    int file = open(id.path, O_RDWR);
    if (file < 0) return SYSTEM_ERROR;
    void *mapped = mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED) return SYSTEM_ERROR;
    auto *comm = new Comm{static_cast<Meeting *>(mapped), rank, ranks};
    step(comm);
    return *handle = reinterpret_cast<size_t>(comm), 0;
}
API int ncclCommDestroy(size_t) { return 0; }
// Not deleted, because an operation in progress reads it.
API int ncclCommAbort(size_t handle) { return comm_of(handle)->aborted = true, 0; }
API int ncclCommGetAsyncError(size_t, int *error) { return *error = 0, 0; }
API int ncclAllGather(unsigned long long from, unsigned long long to, size_t count, int type, size_t comm, size_t stream) {
    size_t bytes = count * width(type) * comm_of(comm)->ranks;
    return enqueue({comm_of(comm), GATHER, at(from), at(to), count, type}, bytes, stream);
}
API int ncclReduceScatter(unsigned long long from, unsigned long long to, size_t count, int type, int operation, size_t comm,
                          size_t stream) {
    if (operation != 0) return INVALID_ARGUMENT;
    return enqueue({comm_of(comm), SCATTER, at(from), at(to), count, type}, count * width(type), stream);
}
API int ncclAllReduce(unsigned long long from, unsigned long long to, size_t count, int type, int operation, size_t comm, size_t stream) {
    if (operation != 0) return INVALID_ARGUMENT;
    return enqueue({comm_of(comm), REDUCE, at(from), at(to), count, type}, count * width(type), stream);
}
API int ncclGroupStart() { return group = Group(), group.open = true, 0; }
API int ncclSend(unsigned long long from, size_t count, int type, int peer, size_t comm, size_t stream) {
    return add(group.from, group.sends, from, count, type, peer, comm, stream);
}
API int ncclRecv(unsigned long long to, size_t count, int type, int peer, size_t comm, size_t stream) {
    return add(group.to, group.receives, to, count, type, peer, comm, stream);
}
API int ncclGroupEnd() {
    Group ended = group;
    group = Group();
    if (!ended.open || ended.wrong) return INVALID_ARGUMENT;
    size_t ranks = comm_of(ended.comm)->ranks;
    if (ended.sends != ranks || ended.receives != ranks) return INVALID_ARGUMENT;
    size_t bytes = ended.count * width(ended.type) * ranks;
    return enqueue({comm_of(ended.comm), EXCHANGE, at(ended.from), at(ended.to), ended.count, ended.type}, bytes, ended.stream);
}
