//! Descriptors over the second socket.
