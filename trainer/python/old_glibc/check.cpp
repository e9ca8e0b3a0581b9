// Uses what newer_glibc.c and newer_libstdcxx.cpp define, and fails if it does not do what the standard says.
#include <sys/stat.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <memory>
#include <mutex>
#include <new>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>

namespace {

void check(bool holds, const char *what) {
    if (holds) return;
    std::cerr << what << std::endl;
    std::exit(1);
}

int thrown_alive = 0;
struct Thrown {
    Thrown() { ++thrown_alive; }
    Thrown(const Thrown &) { ++thrown_alive; }
    ~Thrown() { --thrown_alive; }
};

void exceptions_live_as_long_as_a_pointer_to_them() {
    std::exception_ptr first = std::make_exception_ptr(Thrown());
    std::exception_ptr second = first;
    first = nullptr;
    check(thrown_alive == 1, "an exception has ended before its last exception_ptr");
    bool caught = false;
    try {
        std::rethrow_exception(second);
    } catch (const Thrown &) {
        caught = true;
    }
    check(caught, "rethrow_exception has thrown another exception");
    check(thrown_alive == 1, "an exception has ended when it was rethrown");
    second = nullptr;
    check(thrown_alive == 0, "an exception lives without an exception_ptr");
}

void an_allocation_that_no_memory_holds_is_refused() {
    bool refused = false;
    try {
        (void)std::allocator<long>().allocate(SIZE_MAX);
    } catch (const std::bad_array_new_length &) {
        refused = true;
    }
    check(refused, "an allocation of SIZE_MAX numbers has not thrown bad_array_new_length");
}

void a_stream_and_a_view_have_the_text() {
    std::ostringstream stream;
    stream << "step " << 12;
    std::string text = stream.str();
    std::string_view view = text;
    check(view == "step 12", "ostringstream or string_view have another text");
}

// The second wait almost always ends in the next second, whose nanoseconds are fewer.
void a_wait_ends_after_its_time() {
    using clock = std::chrono::steady_clock;
    std::mutex mutex;
    std::condition_variable condition;
    std::unique_lock<std::mutex> lock(mutex);
    for (int milliseconds : {1, 999}) {
        auto begin = clock::now();
        auto time = std::chrono::milliseconds(milliseconds);
        check(!condition.wait_for(lock, time, [] { return false; }), "a wait for nothing has ended");
        check(clock::now() - begin >= time, "a wait has ended before its time");
        check(clock::now() - begin < time + std::chrono::seconds(30), "a wait has ended long after its time");
    }
}

void another_thread_is_waited_for() {
    auto number = std::make_shared<int>(0);
    std::thread thread([number] { *number = 7; });
    thread.join();
    check(*number == 7, "a thread has not run");
}

void fails() { throw Thrown(); }

void nothing_leaves_a_noexcept_function() noexcept {
    std::string with_a_destructor;
    fails();
}

} // namespace

int main(int, char **arguments) {
    struct stat status;
    check(stat(arguments[0], &status) == 0 && status.st_size > 0, "stat has failed");
    exceptions_live_as_long_as_a_pointer_to_them();
    an_allocation_that_no_memory_holds_is_refused();
    a_stream_and_a_view_have_the_text();
    a_wait_ends_after_its_time();
    another_thread_is_waited_for();
    std::set_terminate([] { std::_Exit(0); });
    nothing_leaves_a_noexcept_function();
    check(false, "an exception has left a noexcept function");
}
