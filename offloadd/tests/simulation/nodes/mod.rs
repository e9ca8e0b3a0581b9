//! Runs a job on two to four nodes, each a daemon of its own, with the rules by which the nodes agree ([`offload_client::nodes`]).
//!
//! What could go wrong: nodes resume from different generations, or from equal numbers with tiles of two starts; a generation that
//! some process was told is confirmed is older than what all resume from; a node with old drives is not noticed. Messages between
//! nodes are late or lost, nodes are cut off from each other, ranks, daemons and nodes die, the power fails, processes stop for a
//! long time and continue, and drives come back with the content of an older copy or of another node.
//!
//! After each incident all nodes resume from one generation: it is not older than any that was confirmed, at most one step is
//! repeated, and every tile of every node is what that node committed for it. A refusal names only nodes whose drives were changed.
//!
//! `OFFLOADD_SEEDS=0..1000000 cargo test -p offloadd --test simulation nodes::` runs other seeds.

mod cluster;
mod member;
mod oracle;

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;

use crate::crashes::seeds_of;

use self::cluster::Cluster;

const SEEDS: std::ops::Range<u64> = 0..500;

/// Events that must occur in the default seeds; otherwise the promise would hold only because nothing happened.
const MUST_HAPPEN: [&str; 16] = [
    "power cuts of a node",
    "power cuts of all nodes",
    "deaths of daemons",
    "deaths of ranks",
    "lost messages",
    "partitions",
    "processes stopped",
    "stopped processes that continued",
    "starts refused beside a stopped process",
    "late calls refused",
    "older copies of drives",
    "disagreements refused",
    "steps repeated",
    "first commits begun again",
    "writes before the confirmation refused",
    "confirmations",
];

/// How often things happened.
type Counts = BTreeMap<&'static str, u64>;

#[test]
fn nodes_resume_from_one_generation_that_is_whole_on_each() {
    let chosen = std::env::var("OFFLOADD_SEEDS").ok();
    let seeds = chosen.as_ref().map_or(SEEDS, |text| {
        seeds_of(text).expect("OFFLOADD_SEEDS is FIRST..END")
    });
    let mut counts = Counts::new();
    for seed in seeds.clone() {
        let run = AssertUnwindSafe(|| Cluster::new(seed, &mut counts).run());
        assert!(
            std::panic::catch_unwind(run).is_ok(),
            "seed {seed}: see above, rerun with OFFLOADD_SEEDS={seed}..{}",
            seed + 1
        );
    }
    println!("seeds {seeds:?}: {counts:?}");
    if chosen.is_none() {
        for what in MUST_HAPPEN {
            let count = counts.get(what).copied().unwrap_or(0);
            assert!(count > 5, "{what}: {count} times");
        }
    }
}
