//! Tests a whole daemon in a virtual machine: QEMU (emulated, so no KVM is needed), Linux's nvme driver, and two drives whose writes and flushes this
//! process serves and records.
//!
//! ```text
//!   guest: writer ── rings ── offloadd ── io_uring ── nvme ──▶ QEMU ── NBD ──▶ drives (here) ──▶ log of writes, flushes
//!      └──────────────── "ACK n" on the serial line ───────────────────────────────────────────▶ and acknowledgements
//! ```
//!
//! Needs qemu-system-x86_64, a static busybox and a kernel with nvme built in (`.ci/test-tools.sh` fetches them; the kernel
//! is `target/guest/vmlinuz` or `OFFLOADD_GUEST_KERNEL`). Where one is missing, the tests are skipped with a message.

mod drives;
mod initramfs;
mod machine;
mod power;
#[path = "../daemon/common/process.rs"]
mod process;
mod removal;
mod service;
#[path = "../daemon/common/store.rs"]
mod store;
mod writer;
