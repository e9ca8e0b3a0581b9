//! Arithmetic of a plan: what to choose from bytes and rates, and what an earlier start measured. It knows neither settings nor
//! machine.

mod bytes;
pub mod choose;
mod measured;

pub use bytes::{BusBytes, TileSums};
pub use measured::{Measured, measured_path};
