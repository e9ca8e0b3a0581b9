//! The commands of bench-io as a person calls them.

mod canonical;
mod gpu;
mod killed;
mod lab;
mod run;
mod said;
mod scale;
mod stopped;
mod testdrives;
mod training;
mod tune;
mod verify;
