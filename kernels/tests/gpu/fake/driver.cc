// A fake GPU driver and run-time compiler, on host memory, for tests without a GPU: the functions our table takes under
// CUDA's names, and with FAKE_HIP under HIP's.
//
// Work is enqueued and runs only when somebody waits for it, as late as a device may run it, so a missing wait shows. Kernels are compiled with the
// C++ compiler of this machine and run thread by thread. One lock covers everything.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <ucontext.h>
#include <unistd.h>
#include <vector>

namespace {

enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_READY = 600, NOT_FOUND = 500, INVALID_HANDLE = 400, REGISTERED = 712 };
const size_t MEMORY_BYTES = size_t(512) << 20;

struct Event;
struct Stream {
    std::deque<std::function<void()>> work;
};
struct Event {
    Stream *stream = nullptr;
    bool timed = false, recorded = false, done = false;
    std::chrono::steady_clock::time_point at;
};

std::recursive_mutex everything;
Stream default_stream;
std::set<Stream *> streams = {&default_stream};
std::map<unsigned long long, std::pair<void *, size_t>> memory;  // by address: what free() takes, and bytes
std::map<size_t, size_t> registered;
size_t used_bytes = 0;

Stream *stream_of(size_t handle) { return handle ? reinterpret_cast<Stream *>(handle) : &default_stream; }
std::shared_ptr<Event> &event_of(size_t handle) { return *reinterpret_cast<std::shared_ptr<Event> *>(handle); }

void run_next(Stream *stream) {
    auto next = std::move(stream->work.front());
    stream->work.pop_front();
    next();
}
void run_all(Stream *stream) {
    while (!stream->work.empty()) run_next(stream);
}
void run_until(const std::shared_ptr<Event> &event) {
    while (event->recorded && !event->done) run_next(event->stream);
}

// Whether a range lies within one allocation; a device would report an illegal address otherwise.
bool allocated(unsigned long long address, size_t bytes) {
    auto after = memory.upper_bound(address);
    if (after == memory.begin()) return false;
    auto found = std::prev(after);
    return address + bytes <= found->first + found->second.second;
}

// Lent memory is freed by its owner, without a word to this driver: what an allocator gives out again is lent no longer.
void forget_lent(unsigned long long address, size_t bytes) {
    auto found = memory.upper_bound(address);
    if (found != memory.begin()) --found;
    while (found != memory.end() && found->first < address + bytes) {
        bool overlaps = found->first + found->second.second > address;
        found = overlaps && !found->second.first ? memory.erase(found) : std::next(found);
    }
}

// One block's threads as fibers.
struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(128 << 10);
    bool done = false;
    unsigned turn = 0;
};
std::vector<std::unique_ptr<Fiber>> fibers;
ucontext_t scheduler;
unsigned running = 0;
unsigned exchanged[2][1024];
void (*current_kernel)(void **);
void **current_places;

void fiber_main() {
    current_kernel(current_places);
    fibers[running]->done = true;
    swapcontext(&fibers[running]->context, &scheduler);
}

}  // namespace

struct StandInIndex {
    unsigned x, y, z;
};
StandInIndex threadIdx, blockIdx, blockDim, gridDim;

void fake_rendezvous() { swapcontext(&fibers[running]->context, &scheduler); }

unsigned fake_exchange(unsigned value, unsigned from_thread) {
    // Two places, so that a thread that is ahead by one exchange does not overwrite values that others still read.
    unsigned *places = exchanged[fibers[running]->turn++ % 2];
    places[threadIdx.x] = value;
    fake_rendezvous();
    return places[from_thread];
}

static void run_block(unsigned threads) {
    while (fibers.size() < threads) fibers.push_back(std::make_unique<Fiber>());
    for (unsigned i = 0; i < threads; i++) {
        Fiber &fiber = *fibers[i];
        fiber.done = false;
        fiber.turn = 0;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        makecontext(&fiber.context, fiber_main, 0);
    }
    for (bool left = true; left;) {
        left = false;
        for (unsigned i = 0; i < threads; i++) {
            if (fibers[i]->done) continue;
            running = i;
            threadIdx = {i, 0, 0};
            swapcontext(&scheduler, &fibers[i]->context);
            left |= !fibers[i]->done;
        }
    }
}

#define API extern "C" __attribute__((visibility("default"))) int
#define LOCK std::lock_guard<std::recursive_mutex> lock(everything)

API cuInit(unsigned) { return 0; }
API cuDriverGetVersion(int *version) { return *version = 13000, 0; }
// One device, or as many as a test of several ranks asks for; each process of such a test uses one of them.
static int devices() {
    const char *count = getenv("KERNELS_FAKE_GPUS");
    return count ? atoi(count) : 1;
}
API cuDeviceGetCount(int *count) { return *count = devices(), 0; }
API cuDeviceGet(int *device, int index) { return *device = index, index < devices() ? 0 : INVALID_VALUE; }
API cuDeviceGetPCIBusId(char *address, int length, int) { return snprintf(address, length, "0000:FA:4E.0"), 0; }
API cuDeviceGetName(char *name, int length, int) { return snprintf(name, length, "fake"), 0; }
API cuDeviceTotalMem_v2(size_t *bytes, int) { return *bytes = MEMORY_BYTES, 0; }
API cuDeviceGetAttribute(int *value, int attribute, int) { return *value = attribute == 75 ? 9 : 0, 0; }
API cuDevicePrimaryCtxRetain(size_t *context, int) { return *context = 1, 0; }
API cuCtxSetCurrent(size_t) { return 0; }
API cuGetErrorString(int code, const char **text) {
    *text = code == OUT_OF_MEMORY ? "out of memory" : "an error of the fake driver";
    return 0;
}
API cuCtxSynchronize() {
    LOCK;
    for (Stream *stream : streams) run_all(stream);
    return 0;
}
API cuMemGetInfo_v2(size_t *free, size_t *total) {
    LOCK;
    *free = MEMORY_BYTES - used_bytes;
    return *total = MEMORY_BYTES, 0;
}
API cuMemAlloc_v2(unsigned long long *address, size_t bytes) {
    LOCK;
    if (bytes == 0) return INVALID_VALUE;
    if (bytes > MEMORY_BYTES - used_bytes) return OUT_OF_MEMORY;
    void *place = nullptr;
    if (posix_memalign(&place, 256, bytes)) return OUT_OF_MEMORY;
    memset(place, 0xCD, bytes);
    used_bytes += bytes;
    *address = reinterpret_cast<unsigned long long>(place);
    forget_lent(*address, bytes);
    memory[*address] = {place, bytes};
    return 0;
}
API cuMemFree_v2(unsigned long long address) {
    LOCK;
    auto found = memory.find(address);
    if (found == memory.end()) return INVALID_VALUE;
    used_bytes -= found->second.second;
    free(found->second.first);
    memory.erase(found);
    return 0;
}
API cuMemHostRegister_v2(size_t address, size_t bytes, unsigned) {
    LOCK;
    if (address < 65536 || bytes == 0) return INVALID_VALUE;
    if (registered.count(address)) return REGISTERED;
    return registered[address] = bytes, 0;
}
API cuMemHostUnregister(size_t address) {
    LOCK;
    return registered.erase(address) ? 0 : INVALID_VALUE;
}

static void *at(unsigned long long address) { return reinterpret_cast<void *>(address); }

// Device memory that goes away between enqueueing and running is what a GPU answers with an illegal address, later and elsewhere.
static void must_be_allocated(unsigned long long address, size_t bytes) {
    if (allocated(address, bytes)) return;
    fprintf(stderr, "fake driver: a copy ran on %zu bytes at %#llx, which are no longer allocated\n", bytes, address);
    abort();
}

// Makes memory of another allocator, such as a tensor's, count as device memory until it is taken back.
API fake_lend(unsigned long long address, size_t bytes) {
    LOCK;
    forget_lent(address, bytes);
    return memory.emplace(address, std::make_pair(nullptr, bytes)).second ? 0 : INVALID_VALUE;
}
API fake_take_back(unsigned long long address) {
    LOCK;
    auto found = memory.find(address);
    if (found == memory.end() || found->second.first) return INVALID_VALUE;
    memory.erase(found);
    return 0;
}

API cuMemcpyHtoDAsync_v2(unsigned long long to, const void *from, size_t bytes, size_t stream) {
    LOCK;
    if (!allocated(to, bytes)) return INVALID_VALUE;
    stream_of(stream)->work.push_back([=] {
        must_be_allocated(to, bytes);
        memcpy(at(to), from, bytes);
    });
    return 0;
}
API cuMemcpyDtoHAsync_v2(void *to, unsigned long long from, size_t bytes, size_t stream) {
    LOCK;
    if (!allocated(from, bytes)) return INVALID_VALUE;
    stream_of(stream)->work.push_back([=] {
        must_be_allocated(from, bytes);
        memcpy(to, at(from), bytes);
    });
    return 0;
}
API cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t bytes, size_t stream) {
    LOCK;
    if (!allocated(to, bytes) || !allocated(from, bytes)) return INVALID_VALUE;
    stream_of(stream)->work.push_back([=] {
        must_be_allocated(to, bytes);
        must_be_allocated(from, bytes);
        memmove(at(to), at(from), bytes);
    });
    return 0;
}
API cuMemsetD8Async(unsigned long long to, unsigned char value, size_t bytes, size_t stream) {
    LOCK;
    if (!allocated(to, bytes)) return INVALID_VALUE;
    stream_of(stream)->work.push_back([=] { memset(at(to), value, bytes); });
    return 0;
}

// For the fake of a library that enqueues work of its own.
API fake_enqueue(size_t stream, unsigned long long address, size_t bytes, void (*run)(void *), void *argument) {
    LOCK;
    if (!allocated(address, bytes)) return INVALID_VALUE;
    stream_of(stream)->work.push_back([=] { run(argument); });
    return 0;
}

API cuStreamCreateWithPriority(size_t *handle, unsigned, int) {
    LOCK;
    Stream *stream = new Stream;
    streams.insert(stream);
    return *handle = reinterpret_cast<size_t>(stream), 0;
}
API cuStreamDestroy_v2(size_t handle) {
    LOCK;
    // Not deleted, because an event may refer to it. Remaining work runs first.
    run_all(stream_of(handle));
    streams.erase(stream_of(handle));
    return 0;
}
API cuStreamSynchronize(size_t handle) {
    LOCK;
    run_all(stream_of(handle));
    return 0;
}
API cuStreamWaitEvent(size_t handle, size_t event, unsigned) {
    LOCK;
    auto waited = event_of(event);
    stream_of(handle)->work.push_back([=] { run_until(waited); });
    return 0;
}
API cuEventCreate(size_t *handle, unsigned flags) {
    auto event = std::make_shared<Event>();
    event->timed = !(flags & 2);
    *handle = reinterpret_cast<size_t>(new std::shared_ptr<Event>(event));
    return 0;
}
API cuEventDestroy_v2(size_t handle) {
    LOCK;
    delete &event_of(handle);
    return 0;
}
API cuEventRecord(size_t handle, size_t stream) {
    LOCK;
    auto event = event_of(handle);
    event->stream = stream_of(stream);
    event->recorded = true;
    event->stream->work.push_back([=] {
        event->done = true;
        event->at = std::chrono::steady_clock::now();
    });
    return 0;
}
API cuEventQuery(size_t handle) {
    LOCK;
    auto event = event_of(handle);
    if (event->done) return 0;
    // Some work runs at each query, so that a caller that only queries reaches the end.
    run_next(event->stream);
    return NOT_READY;
}
API cuEventSynchronize(size_t handle) {
    LOCK;
    run_until(event_of(handle));
    return 0;
}
API cuEventElapsedTime(float *ms, size_t start, size_t end) {
    LOCK;
    auto a = event_of(start), b = event_of(end);
    if (!a->timed || !b->timed) return INVALID_HANDLE;
    if (!a->done || !b->done) return NOT_READY;
    *ms = std::chrono::duration<float, std::milli>(b->at - a->at).count();
    return 0;
}

struct StandInModule {
    void *library;
};
struct FakeFunction {
    void (*call)(void **);
    std::vector<size_t> argument_bytes;
};

API cuModuleLoadData(size_t *handle, const void *image) {
    void *library = dlopen(static_cast<const char *>(image), RTLD_NOW | RTLD_LOCAL);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), INVALID_VALUE;
    return *handle = reinterpret_cast<size_t>(new StandInModule{library}), 0;
}
API cuModuleUnload(size_t handle) {
    delete reinterpret_cast<StandInModule *>(handle);
    return 0;
}
API cuModuleGetFunction(size_t *handle, size_t module, const char *name) {
    void *library = reinterpret_cast<StandInModule *>(module)->library;
    auto call = reinterpret_cast<void (*)(void **)>(dlsym(library, (std::string(name) + "_fake").c_str()));
    auto bytes = reinterpret_cast<size_t (*)(size_t *)>(dlsym(library, (std::string(name) + "_fake_bytes").c_str()));
    if (!call || !bytes) return NOT_FOUND;
    size_t all[64];
    size_t count = bytes(all);
    *handle = reinterpret_cast<size_t>(new FakeFunction{call, std::vector<size_t>(all, all + count)});
    return 0;
}
API cuFuncGetAttribute(int *value, int, size_t) { return *value = 0, 0; }
API cuLaunchKernel(size_t handle, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned,
                   size_t stream, void **places, void **) {
    LOCK;
    if (gx == 0 || gy != 1 || gz != 1 || bx == 0 || bx > 1024 || by != 1 || bz != 1) return INVALID_VALUE;
    auto *function = reinterpret_cast<FakeFunction *>(handle);
    // Arguments are copied when a kernel is launched, as a driver does.
    std::vector<std::vector<char>> copies;
    for (size_t i = 0; i < function->argument_bytes.size(); i++) {
        auto *from = static_cast<char *>(places[i]);
        copies.emplace_back(from, from + function->argument_bytes[i]);
    }
    stream_of(stream)->work.push_back([=]() mutable {
        std::vector<void *> own;
        for (auto &copy : copies) own.push_back(copy.data());
        current_kernel = function->call;
        current_places = own.data();
        gridDim = {gx, 1, 1};
        blockDim = {bx, 1, 1};
        for (unsigned x = 0; x < gx; x++) {
            blockIdx = {x, 0, 0};
            run_block(bx);
        }
    });
#ifdef FAKE_EAGER
    // For tests whose other operations run immediately: torch's on the CPU.
    run_all(stream_of(stream));
#endif
    return 0;
}

struct Program {
    std::string source, log, library;
};
static Program *program_of(size_t handle) { return reinterpret_cast<Program *>(handle); }

static std::string text_of(const std::string &path) {
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

API nvrtcVersion(int *major, int *minor) { return *major = 13, *minor = 0, 0; }
API nvrtcCreateProgram(size_t *handle, const char *source, const char *, int, const char *const *, const char *const *) {
    return *handle = reinterpret_cast<size_t>(new Program{source, "", ""}), 0;
}
API nvrtcCompileProgram(size_t handle, int count, const char *const *options) {
    LOCK;
    static int number = 0;
    Program *program = program_of(handle);
    const char *driver = getenv("KERNELS_FAKE"), *compiler = getenv("CXX");
    if (!driver) return 7;
    std::string base = std::string(driver) + "_kernel" + std::to_string(getpid()) + "_" + std::to_string(number++);
    std::string flags = " -ffp-contract=off";
    for (int i = 0; i < count; i++) {
        std::string option = options[i];
        if (option.rfind("-D", 0) == 0) flags += " '" + option + "'";
    }
    {
        std::ofstream file(base + ".cc");
        file << "#include \"" << KERNEL_HEADER << "\"\nextern int fake_source_starts;\n" << program->source << "\n";
    }
    std::string cxx = compiler && *compiler ? compiler : "c++";
    // Kernel names are collected where macros are expanded, because some names are composed by macros.
    if (system((cxx + " -std=c++17 -E -P" + flags + " -o '" + base + ".ii' '" + base + ".cc' 2> /dev/null").c_str()) == 0) {
        std::string expanded = text_of(base + ".ii");
        expanded.erase(0, expanded.find("fake_source_starts"));
        std::ofstream file(base + ".cc", std::ios::app);
        std::regex kernel("extern \"C\"\\s+void\\s+(\\w+)\\(");
        for (std::sregex_iterator it(expanded.begin(), expanded.end(), kernel), end; it != end; ++it)
            file << "FAKE_KERNEL(" << (*it)[1] << ")\n";
    }
    std::string command = cxx + " -std=c++17 -O1 -w -fPIC -shared -fno-strict-aliasing" +
                          flags + " -o '" + base + ".so' '" + base + ".cc' '" + driver + "' 2> '" + base + ".log'";
    int answer = system(command.c_str());
    program->log = text_of(base + ".log").substr(0, 20000);
    program->library = base + ".so";
    return answer == 0 ? 0 : 6;
}
API nvrtcGetProgramLogSize(size_t handle, size_t *bytes) { return *bytes = program_of(handle)->log.size() + 1, 0; }
API nvrtcGetProgramLog(size_t handle, char *log) { return strcpy(log, program_of(handle)->log.c_str()), 0; }
API nvrtcGetCUBINSize(size_t handle, size_t *bytes) { return *bytes = program_of(handle)->library.size() + 1, 0; }
API nvrtcGetCUBIN(size_t handle, char *code) { return strcpy(code, program_of(handle)->library.c_str()), 0; }
API nvrtcDestroyProgram(size_t *handle) {
    delete program_of(*handle);
    return *handle = 0, 0;
}

#ifdef FAKE_HIP
// HIP's names for functions with the same arguments.
#define ALSO(cuda, hip) extern "C" __attribute__((alias(#cuda), visibility("default"))) decltype(cuda) hip
ALSO(cuInit, hipInit);
ALSO(cuDriverGetVersion, hipDriverGetVersion);
ALSO(cuDeviceGetCount, hipGetDeviceCount);
ALSO(cuDeviceGet, hipDeviceGet);
ALSO(cuDeviceGetName, hipDeviceGetName);
ALSO(cuDeviceGetPCIBusId, hipDeviceGetPCIBusId);
ALSO(cuDeviceTotalMem_v2, hipDeviceTotalMem);
ALSO(cuMemGetInfo_v2, hipMemGetInfo);
ALSO(cuMemAlloc_v2, hipMalloc);
ALSO(cuCtxSynchronize, hipDeviceSynchronize);
ALSO(cuMemFree_v2, hipFree);
ALSO(cuMemHostRegister_v2, hipHostRegister);
ALSO(cuMemHostUnregister, hipHostUnregister);
ALSO(cuMemcpyHtoDAsync_v2, hipMemcpyHtoDAsync);
ALSO(cuMemcpyDtoHAsync_v2, hipMemcpyDtoHAsync);
ALSO(cuMemcpyDtoDAsync_v2, hipMemcpyDtoDAsync);
ALSO(cuMemsetD8Async, hipMemsetD8Async);
ALSO(cuStreamCreateWithPriority, hipStreamCreateWithPriority);
ALSO(cuStreamDestroy_v2, hipStreamDestroy);
ALSO(cuStreamSynchronize, hipStreamSynchronize);
ALSO(cuStreamWaitEvent, hipStreamWaitEvent);
ALSO(cuEventCreate, hipEventCreateWithFlags);
ALSO(cuEventDestroy_v2, hipEventDestroy);
ALSO(cuEventRecord, hipEventRecord);
ALSO(cuEventQuery, hipEventQuery);
ALSO(cuEventSynchronize, hipEventSynchronize);
ALSO(cuEventElapsedTime, hipEventElapsedTime);
ALSO(cuModuleLoadData, hipModuleLoadData);
ALSO(cuModuleUnload, hipModuleUnload);
ALSO(cuModuleGetFunction, hipModuleGetFunction);
ALSO(cuFuncGetAttribute, hipFuncGetAttribute);
ALSO(cuLaunchKernel, hipModuleLaunchKernel);
ALSO(nvrtcVersion, hiprtcVersion);
ALSO(nvrtcCreateProgram, hiprtcCreateProgram);
ALSO(nvrtcCompileProgram, hiprtcCompileProgram);
ALSO(nvrtcGetProgramLogSize, hiprtcGetProgramLogSize);
ALSO(nvrtcGetProgramLog, hiprtcGetProgramLog);
ALSO(nvrtcGetCUBINSize, hiprtcGetCodeSize);
ALSO(nvrtcGetCUBIN, hiprtcGetCode);
ALSO(nvrtcDestroyProgram, hiprtcDestroyProgram);

API hipSetDevice(int index) { return index == 0 ? 0 : INVALID_VALUE; }
extern "C" __attribute__((visibility("default"))) const char *hipGetErrorString(int code) {
    const char *text;
    return cuGetErrorString(code, &text), text;
}
// The structure has the size and the place of the architecture's name of ROCm 6.
API hipGetDevicePropertiesR0600(char *properties, int) {
    memset(properties, 0, 1472);
    strcpy(properties, "fake");
    strcpy(properties + 1160, "gfx90a:sramecc+:xnack-");
    return 0;
}
#endif
