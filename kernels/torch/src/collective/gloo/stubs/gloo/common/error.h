// torch's ProcessGroupGloo.hpp asks for this header and needs nothing of it. The wheels bring no headers of Gloo.
#pragma once
