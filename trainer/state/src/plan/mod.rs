//! Calculations of a plan from bytes and rates, and measurements of an earlier start. Knows neither settings
//! nor machine.

mod amount;
pub mod assumed;
mod bytes;
pub mod choose;
mod directions;
mod measured;
mod memory;
pub mod node_copy;
pub mod updaters;

pub use amount::{Drives, parse_count, parse_drives, parse_rate};
pub use bytes::{BusBytes, TileSums};
pub use directions::Directions;
pub use measured::{MeasuredRates, measured_path};
pub use memory::parse_memory;
