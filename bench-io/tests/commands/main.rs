//! Tests the commands of bench-io as a user calls them.

mod gpu;
mod harness;
mod killed;
mod output;
mod run;
mod scale;
mod stopped;
mod testdrives;
mod training;
