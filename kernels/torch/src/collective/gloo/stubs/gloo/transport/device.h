// A device is made and used inside libtorch only; here it is a name behind a shared pointer. The wheels bring no headers
// of Gloo.
#pragma once

namespace gloo {
namespace transport {
class Device;
} // namespace transport
} // namespace gloo
