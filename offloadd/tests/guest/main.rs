//! A whole daemon in a machine of its own: QEMU (emulated, so no KVM is needed), Linux's nvme driver, two drives whose every
//! write and flush this process serves and remembers.
//!
//! ```text
//!   guest: writer ── rings ── offloadd ── io_uring ── nvme ──▶ QEMU ── NBD ──▶ drives (here) ──▶ log of writes, flushes
//!      └──────────────── "ACK n" on the serial line ───────────────────────────────────────────▶ and acknowledgements
//! ```
//!
//! Needs qemu-system-x86_64, a static busybox and a kernel with nvme built in (`.ci/test-tools.sh` fetches them; the kernel
//! is `target/guest/vmlinuz` or `OFFLOADD_GUEST_KERNEL`). Where one is missing the tests say so and are skipped.

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
