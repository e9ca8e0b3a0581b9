//! Lets tests change a running program, by environment variables.
//!
//! | variable | module | effect |
//! |---|---|---|
//! | `OFFLOADD_DISABLE` | [`safeguard`] | disables a safeguard, so that a named test fails |
//! | `OFFLOADD_FAULT` | [`injected_fault`] | lets one operation of a daemon fail, or cuts the power there |
//! | `OFFLOADD_FAULT_FLUSH` | [`injected_fault`] | lets flushes of a daemon fail while a file exists |
//! | `OFFLOADD_KILL` | [`kill_point`] | kills a training process at a named point |
//! | `OFFLOADD_RATE_LIMIT` | [`rate_limit`] | limits the speed of devices |
//!
//! [`random`] and [`port`] are for the tests themselves.
//!
//! The hooks exist only with the feature `active`, which only test builds have. Without it every question is a constant and no
//! code is left.

#![deny(unsafe_code)]
#![warn(missing_docs)]

pub mod injected_fault;
pub mod kill_point;
pub mod port;
pub mod random;
pub mod rate_limit;
pub mod safeguard;
