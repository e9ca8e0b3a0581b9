// libtorch's Gloo and its stores (c10d) as plain C functions. Each catches every C++ exception and returns its text, or
// NULL after success; free the text with offload_free_message.
//
// An operation works on the caller's memory without copying it. It may touch the memory until its wait reports the end,
// also after a failure, and the caller keeps the memory until then.

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "../../guarded.h"

namespace {

using Milliseconds = std::chrono::milliseconds;

struct Store {
    c10::intrusive_ptr<c10d::Store> store;
};

struct Group {
    c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo;
    Milliseconds timeout;
};

// Set by a callback of the operation's future, which runs when Gloo no longer uses the memory.
struct Done {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    std::string error;
    bool failed = false;
};

struct Operation {
    c10::intrusive_ptr<c10d::Work> work;
    std::shared_ptr<Done> done;
};

at::Tensor over(void *bytes, size_t count) {
    return at::from_blob(bytes, {static_cast<int64_t>(count)}, at::kByte);
}

void *started(c10::intrusive_ptr<c10d::Work> work) {
    auto done = std::make_shared<Done>();
    auto future = work->getFuture();
    future->addCallback([done](c10::ivalue::Future &future) {
        std::lock_guard<std::mutex> lock(done->mutex);
        done->failed = future.hasError();
        if (done->failed) done->error = future.tryRetrieveErrorMessage();
        done->done = true;
        done->changed.notify_all();
    });
    return new Operation{std::move(work), std::move(done)};
}

} // namespace

extern "C" {

char *offload_store_dir(const char *path, int ranks, int timeout_ms, void **store) {
    return guarded([&] {
        auto file = c10::make_intrusive<c10d::FileStore>(path, ranks);
        file->setTimeout(Milliseconds(timeout_ms));
        *store = new Store{std::move(file)};
    });
}

// With a listen_fd (bound, listening; ours from now on) this process runs the store, otherwise it is a client.
char *offload_store_tcp(const char *host, int port, int listen_fd, int timeout_ms, const char *prefix, void **store) {
    return guarded([&] {
        c10d::TCPStoreOptions options;
        options.port = static_cast<std::uint16_t>(port);
        options.isServer = listen_fd >= 0;
        if (options.isServer) options.masterListenFd = listen_fd;
        options.waitWorkers = false;
        options.timeout = Milliseconds(timeout_ms);
        auto tcp = c10::make_intrusive<c10d::TCPStore>(host, options);
        *store = new Store{c10::make_intrusive<c10d::PrefixStore>(prefix, std::move(tcp))};
    });
}

char *offload_store_set(void *store, const char *key, const unsigned char *bytes, size_t count) {
    return guarded([&] {
        static_cast<Store *>(store)->store->set(key, std::vector<uint8_t>(bytes, bytes + count));
    });
}

// Copies at most `room` bytes; `count` is the value's length, or SIZE_MAX if the key is not set.
char *offload_store_get(void *store, const char *key, unsigned char *bytes, size_t room, size_t *count) {
    return guarded([&] {
        auto &c10d = static_cast<Store *>(store)->store;
        if (!c10d->check({key})) {
            *count = SIZE_MAX;
            return;
        }
        auto value = c10d->get(key);
        *count = value.size();
        std::memcpy(bytes, value.data(), std::min(room, value.size()));
    });
}

char *offload_store_add(void *store, const char *key, long long amount, long long *sum) {
    return guarded([&] { *sum = static_cast<Store *>(store)->store->add(key, amount); });
}

void offload_store_free(void *store) { delete static_cast<Store *>(store); }

// Blocks until all ranks are connected. `interface` is NULL or the name of the network interface.
char *offload_gloo_connect(void *store, int rank, int ranks, const char *address, const char *interface, int connect_ms,
                           int operation_ms, void **group) {
    return guarded([&] {
        auto options = c10d::ProcessGroupGloo::Options::create(Milliseconds(connect_ms));
        options->devices.push_back(interface == nullptr
                                       ? c10d::ProcessGroupGloo::createDeviceForHostname(address)
                                       : c10d::ProcessGroupGloo::createDeviceForInterface(interface));
        auto gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(static_cast<Store *>(store)->store, rank, ranks,
                                                                std::move(options));
        *group = new Group{std::move(gloo), Milliseconds(operation_ms)};
    });
}

char *offload_gloo_all_gather(void *group, unsigned char *bytes, int rank, int ranks, size_t shard_bytes, void **op) {
    return guarded([&] {
        auto *g = static_cast<Group *>(group);
        c10d::AllgatherOptions options;
        options.timeout = g->timeout;
        auto whole = over(bytes, shard_bytes * static_cast<size_t>(ranks));
        auto own = over(bytes + shard_bytes * static_cast<size_t>(rank), shard_bytes);
        *op = started(g->gloo->_allgather_base(whole, own, options));
    });
}

char *offload_gloo_all_to_all(void *group, unsigned char *from, unsigned char *to, size_t bytes, void **op) {
    return guarded([&] {
        auto *g = static_cast<Group *>(group);
        c10d::AllToAllOptions options;
        options.timeout = g->timeout;
        auto input = over(from, bytes), output = over(to, bytes);
        std::vector<int64_t> equal_parts;
        *op = started(g->gloo->alltoall_base(output, input, equal_parts, equal_parts, options));
    });
}

char *offload_gloo_broadcast(void *group, unsigned char *bytes, size_t count, int root, void **op) {
    return guarded([&] {
        auto *g = static_cast<Group *>(group);
        c10d::BroadcastOptions options;
        options.timeout = g->timeout;
        options.rootRank = root;
        options.rootTensor = 0;
        std::vector<at::Tensor> tensors{over(bytes, count)};
        *op = started(g->gloo->broadcast(tensors, options));
    });
}

// Waits at most `wait_ms`. `done` means that the operation has ended and the memory is the caller's again. A message
// means failure.
char *offload_gloo_wait(void *op, int wait_ms, int *done) {
    auto *state = static_cast<Operation *>(op)->done.get();
    std::unique_lock<std::mutex> lock(state->mutex);
    *done = state->changed.wait_for(lock, Milliseconds(wait_ms), [&] { return state->done; });
    return state->done && state->failed ? copy_message(state->error.c_str()) : nullptr;
}

void offload_gloo_operation_free(void *op) { delete static_cast<Operation *>(op); }

// Waits for Gloo's threads, which an operation in flight may occupy until its timeout.
void offload_gloo_free(void *group) { delete static_cast<Group *>(group); }

} // extern "C"
