// Functions that tch lacks, as plain C functions. Each that may fail catches every C++ exception and returns its text, or NULL
// after success; free the text with offload_free_message.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Tensor.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include "guarded.h"

namespace {

std::vector<at::Tensor> gather(void *const *tensors, size_t count) {
    std::vector<at::Tensor> list;
    list.reserve(count);
    for (size_t i = 0; i < count; i++) list.push_back(*static_cast<at::Tensor *>(tensors[i]));
    return list;
}

} // namespace

extern "C" {

char *offload_vjp(void *const *outputs, void *const *grad_outputs, size_t output_count, void *const *inputs,
                  size_t input_count, void **results) {
    return guarded([&] {
        auto grads = torch::autograd::grad(gather(outputs, output_count), gather(inputs, input_count),
                                           gather(grad_outputs, output_count), /*retain_graph=*/false,
                                           /*create_graph=*/false, /*allow_unused=*/false);
        TORCH_CHECK(grads.size() == input_count, "autograd returned ", grads.size(), " gradients for ", input_count,
                    " inputs");
        // Only new itself throws below, so an error leaks no partly written result.
        std::vector<std::unique_ptr<at::Tensor>> owned;
        owned.reserve(input_count);
        for (auto &grad : grads) owned.push_back(std::make_unique<at::Tensor>(std::move(grad)));
        for (size_t i = 0; i < input_count; i++) results[i] = owned[i].release();
    });
}

char *offload_attention_of_documents(void *query, void *key, void *value, void *bounds, int64_t longest,
                                     int64_t window, void **result) {
    return guarded([&] {
        auto tensor = [](void *raw) -> const at::Tensor & { return *static_cast<at::Tensor *>(raw); };
        auto before = window > 0 ? std::make_optional(window - 1) : std::nullopt;
        auto after = window > 0 ? std::make_optional<int64_t>(0) : std::nullopt;
        auto outputs = at::_flash_attention_forward(tensor(query), tensor(key), tensor(value), tensor(bounds),
                                                    tensor(bounds), longest, longest, /*dropout_p=*/0.0,
                                                    /*is_causal=*/true, /*return_debug_mask=*/false,
                                                    /*scale=*/std::nullopt, before, after);
        *result = std::make_unique<at::Tensor>(std::get<0>(outputs)).release();
    });
}

// tch has no factors for addmm.
char *offload_orthogonal(void *matrix, const double *coefficients, double eps, uint64_t steps, void **result) {
    return guarded([&] {
        const auto &given = *static_cast<at::Tensor *>(matrix);
        const double a = coefficients[0], b = coefficients[1], c = coefficients[2];
        const bool tall = given.size(0) > given.size(1);
        auto wide = given.to(at::kBFloat16);
        if (tall) wide = wide.t();
        wide = wide.div(wide.norm().clamp_min(eps));
        for (uint64_t step = 0; step < steps; step++) {
            auto gram = wide.matmul(wide.t());
            wide = at::addmm(wide, at::addmm(gram, gram, gram, b, c), wide, a);
        }
        *result = std::make_unique<at::Tensor>(tall ? wide.t() : wide).release();
    });
}

// A clone shares the tensor itself, a view only its storage.
size_t offload_share_count(void *raw) {
    auto *tensor = static_cast<at::Tensor *>(raw);
    return std::max(tensor->use_count(), tensor->storage().use_count());
}

char *offload_set_deterministic(int on) {
    return guarded([&] {
        at::globalContext().setDeterministicAlgorithms(on != 0, /*warn_only=*/false);
        // Otherwise torch fills every new tensor with NaN, at the cost of a pass over memory.
        at::globalContext().setDeterministicFillUninitializedMemory(false);
        at::globalContext().setDeterministicCuDNN(on != 0);
        at::globalContext().setBenchmarkCuDNN(false);
    });
}

char *offload_set_threads(int count) {
    return guarded([&] { at::set_num_threads(count); });
}

[[noreturn]] void offload_exit(int status) {
    std::fflush(nullptr);
    std::_Exit(status);
}

// torch treats a HIP device as a CUDA device, so there is one kind of device here.
char *offload_use_gpu(int index) {
    return guarded([&] {
        at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
        c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA)
            .setDevice(c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)));
        at::globalContext().setAllowTF32CuBLAS(false);
        at::globalContext().setAllowTF32CuDNN(false);
    });
}

char *offload_gpu_memory(int index, uint64_t *allocated_peak, uint64_t *reserved_peak, int reset) {
    return guarded([&] {
        auto *allocator = c10::getDeviceAllocator(c10::DeviceType::CUDA);
        auto device = static_cast<c10::DeviceIndex>(index);
        auto stats = allocator->getDeviceStats(device);
        auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
        *allocated_peak = static_cast<uint64_t>(stats.allocated_bytes[all].peak);
        *reserved_peak = static_cast<uint64_t>(stats.reserved_bytes[all].peak);
        if (reset != 0) allocator->resetPeakStats(device);
    });
}

// After an error `release` is not called: the caller still owns `owner`.
char *offload_gpu_tensor(void *address, int scalar_type, const int64_t *sizes, const int64_t *strides, size_t dims,
                         int index, void *owner, void (*release)(void *), void **result) {
    return guarded([&] {
        c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index));
        auto options = at::TensorOptions().dtype(static_cast<at::ScalarType>(scalar_type)).device(device);
        auto tensor = std::make_unique<at::Tensor>();
        // Until the tensor is complete, freeing it must not free what the caller still owns.
        auto armed = std::make_shared<bool>(false);
        *tensor = at::from_blob(
            address, at::IntArrayRef(sizes, dims), at::IntArrayRef(strides, dims),
            [owner, release, armed](void *) {
                if (*armed) release(owner);
            },
            options, device);
        *armed = true;
        *result = tensor.release();
    });
}

void offload_free_message(char *message) { std::free(message); }

} // extern "C"
