//! Tests the client with real daemons, on files of a drive. Each test starts its own daemon; `offloadd` must be built (`cargo test` of the workspace
//! does that) and is searched for where a private daemon is.

mod crashes;
mod death;
mod generations;
mod hostile;
mod private;
mod rate_limited;
mod real;
mod restart;
mod tiles;
