//! The commands of bench-io as a person calls them.

mod canonical;
mod gpu;
mod killed;
mod lab;
mod paced;
mod run;
mod said;
mod scale;
mod stopped;
mod training;
mod tune;
mod verify;
