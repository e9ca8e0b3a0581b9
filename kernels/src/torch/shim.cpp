// What tch does not offer, as plain C functions. Each catches every C++ exception and returns its text
// (NULL when all went well), to be freed with offload_free_message.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Tensor.h>
#include <torch/csrc/autograd/autograd.h>

namespace {

char *copy_message(const char *text) {
    char *copy = strdup(text);
    // Without memory for the message NULL would read as success.
    if (copy == nullptr) std::abort();
    return copy;
}

template <typename F> char *guarded(F f) {
    try {
        f();
        return nullptr;
    } catch (const c10::Error &e) {
        return copy_message(e.what_without_backtrace());
    } catch (const std::exception &e) {
        return copy_message(e.what());
    } catch (...) {
        return copy_message("an exception of unknown type");
    }
}

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
        // Nothing below throws but new itself, so on an error no result is leaked half written.
        std::vector<std::unique_ptr<at::Tensor>> owned;
        owned.reserve(input_count);
        for (auto &grad : grads) owned.push_back(std::make_unique<at::Tensor>(std::move(grad)));
        for (size_t i = 0; i < input_count; i++) results[i] = owned[i].release();
    });
}

// A clone shares the tensor itself, a view its storage only.
size_t offload_share_count(void *raw) {
    auto *tensor = static_cast<at::Tensor *>(raw);
    return std::max(tensor->use_count(), tensor->storage().use_count());
}

char *offload_set_deterministic(int on) {
    return guarded([&] {
        at::globalContext().setDeterministicAlgorithms(on != 0, /*warn_only=*/false);
        // It would fill every fresh tensor with NaN: a help in finding bugs that costs a pass over memory.
        at::globalContext().setDeterministicFillUninitializedMemory(false);
        at::globalContext().setDeterministicCuDNN(on != 0);
        at::globalContext().setBenchmarkCuDNN(false);
    });
}

char *offload_set_threads(int count) {
    return guarded([&] { at::set_num_threads(count); });
}

void offload_free_message(char *message) { std::free(message); }

} // extern "C"
