// The part of Gloo's context that torch's ProcessGroupGloo.hpp needs: it exists and takes a timeout. The wheels bring no
// headers of Gloo. A context is only ever made and used inside libtorch, so its size stays unknown here.
#pragma once

#include <chrono>
#include <memory>

namespace gloo {
namespace transport {
class UnboundBuffer;
} // namespace transport

class Context {
 public:
  Context() = delete;
  void setTimeout(std::chrono::milliseconds timeout);
};
} // namespace gloo
