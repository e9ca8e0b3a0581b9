// Wraps the functions of every C++ shim: an exception becomes its text, NULL means success. Free the text with offload_free_message.
#pragma once

#include <cstdlib>
#include <cstring>
#include <exception>

#include <c10/util/Exception.h>

namespace {

char *copy_message(const char *text) {
    char *copy = strdup(text);
    // Without memory for the message, NULL would mean success.
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

} // namespace
