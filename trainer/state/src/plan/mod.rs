//! Calculations of a plan from bytes and rates, and measurements of an earlier start. Knows neither settings
//! nor machine.

pub mod assumed;
mod bytes;
pub mod choose;
mod measured;

pub use bytes::{BusBytes, TileSums};
pub use measured::{MeasuredRates, measured_path};
