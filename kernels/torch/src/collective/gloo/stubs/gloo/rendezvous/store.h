// The base class of a store that torch's ProcessGroupGloo.hpp derives from. The wheels bring no headers of Gloo. No
// object of it is ever made here (its functions are pure, and the derived class is only made inside libtorch).
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace gloo {
namespace rendezvous {
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string &key, const std::vector<char> &value) = 0;
  virtual std::vector<char> get(const std::string &key) = 0;
  virtual void wait(const std::vector<std::string> &keys) = 0;
  virtual void wait(const std::vector<std::string> &keys, const std::chrono::milliseconds &timeout) = 0;
};
} // namespace rendezvous
} // namespace gloo
