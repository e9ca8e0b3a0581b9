//! What lies on the devices.

pub mod definition;
