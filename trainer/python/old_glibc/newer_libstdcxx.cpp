// Symbols of libstdc++ that are newer than GCC 8's, which systems with glibc 2.28 have, and that newer headers use without being asked.
// Each is hidden: the libraries of a newer system keep their own. Functions get the compiler's names for members of std.
#include <cstddef>
#include <exception>
#include <ios>
#include <new>
#include <sstream>
#include <string>
#include <string_view>

#define NAMED(symbol) __asm__(symbol) __attribute__((visibility("hidden"), used))

extern "C" void __cxa_free_exception(void *thrown) noexcept;
extern "C" void *__cxa_begin_catch(void *exception) noexcept;

namespace {

// What the C++ ABI and libstdc++ keep before a thrown object (x86-64).
struct BeforeThrown {
    int references;
    alignas(16) const void *type;
    void (*destroy)(void *);
    void *others[12];
};
static_assert(sizeof(BeforeThrown) == 128 && offsetof(BeforeThrown, type) == 16);

BeforeThrown *before(void *thrown) { return static_cast<BeforeThrown *>(thrown) - 1; }

// GCC 12's <iostream> makes one in every file.
std::ios_base::Init streams;

} // namespace

extern "C" {

// GLIBCXX_3.4.29: std::__throw_bad_array_new_length(), of std::allocator
[[noreturn]] void throw_bad_array_new_length() NAMED("_ZSt28__throw_bad_array_new_lengthv");
void throw_bad_array_new_length() { throw std::bad_array_new_length(); }

// GLIBCXX_3.4.26: std::string::operator std::string_view() const
std::string_view view(const std::string *text) NAMED("_ZNKSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEcvSt17basic_string_viewIcS2_EEv");
std::string_view view(const std::string *text) { return {text->data(), text->size()}; }

// GLIBCXX_3.4.26: std::ostringstream::ostringstream()
void make_stream(void *at) NAMED("_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void make_stream(void *at) { new (at) std::ostringstream(std::ios_base::out); }

// CXXABI_1.3.13: std::exception_ptr::_M_addref() and _M_release()
void add_reference(void **pointer) noexcept NAMED("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
void add_reference(void **pointer) noexcept {
    if (*pointer != nullptr) __atomic_add_fetch(&before(*pointer)->references, 1, __ATOMIC_ACQ_REL);
}
void release(void **pointer) noexcept NAMED("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
void release(void **pointer) noexcept {
    if (*pointer == nullptr || __atomic_sub_fetch(&before(*pointer)->references, 1, __ATOMIC_ACQ_REL) > 0) return;
    if (before(*pointer)->destroy != nullptr) before(*pointer)->destroy(*pointer);
    __cxa_free_exception(*pointer);
    *pointer = nullptr;
}

// CXXABI_1.3.15 (GCC 14): an exception leaves a noexcept function.
[[noreturn]] void call_terminate(void *exception) noexcept NAMED("__cxa_call_terminate");
void call_terminate(void *exception) noexcept {
    __cxa_begin_catch(exception);
    std::terminate();
}

// GLIBCXX_3.4.32 (GCC 13): std::ios_base_library_init(), by which <iostream> asks for a library that makes the streams itself
void make_streams() NAMED("_ZSt21ios_base_library_initv");
void make_streams() {}

} // extern "C"
