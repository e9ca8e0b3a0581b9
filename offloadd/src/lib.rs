//! The per-node daemon. Owns pinned host memory and NVMe drives, and moves tiles between them for training processes.
//!
//! ```text
//!   gRPC socket ──▶ server ──Call──▶┌────────┐──Event──▶┌──────┐
//!   descriptors, life lines ───────▶│ driver │          │ core │  decides: sessions, jobs, commits
//!   rings ───────── doorbells ─────▶│        │◀─Action──└──────┘
//!   devices ◀────── engine ◀───Io───└────────┘              ▲ once, at start
//!      ▲                                                    │
//!      └── blocks ◀── store: format, recover, verify ───────┘
//! ```
//!
//! One owner thread runs the driver and the core, without locks. The core has no clock, thread, file or async code, so
//! `tests/simulation` drives it through thousands of seeded crashes.

pub mod arena;
pub mod blocks;
pub mod calibrate;
pub mod check;
pub mod config;
pub mod core;
pub mod daemon;
pub mod device;
pub mod device_admission;
pub mod doctor;
mod drive_queue;
pub mod driver;
pub mod engine;
pub mod error_text;
pub mod findings;
pub mod handover;
pub mod io;
pub mod measure;
pub mod metrics;
pub mod numa;
pub mod queue;
pub mod quota;
mod rate_limiter;
pub mod retry;
pub mod server;
pub mod store;
pub mod store_devices;

/// The contract with clients, for programs that drive parts of the daemon themselves.
pub use offload_api as api;
