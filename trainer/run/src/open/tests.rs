//! Tests of what ranks must choose alike.

use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tempfile::TempDir;
use training_state::ranks::{Group, GroupError};

use super::*;
use crate::config::check;

/// What the other rank says in each of some calls; in the others the same as this one.
type Says = Vec<(usize, Vec<u8>)>;

/// The first of two ranks.
struct WithOther {
    says: Says,
    calls: Mutex<usize>,
}

impl WithOther {
    fn saying(says: Says) -> Arc<Self> {
        Arc::new(Self {
            says,
            calls: Mutex::new(0),
        })
    }
}

impl Group for WithOther {
    fn rank(&self) -> u32 {
        0
    }

    fn ranks(&self) -> u32 {
        2
    }

    fn gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, GroupError> {
        let mut calls = self.calls.lock().unwrap();
        let said = self.says.iter().find(|(call, _)| call == &*calls);
        *calls += 1;
        let mut other = said.map_or(own.to_vec(), |(_, bytes)| bytes.clone());
        // All say as much as the longest.
        other.resize(own.len().max(other.len()), 0);
        Ok(vec![own.to_vec(), other])
    }
}

fn tree(dir: &TempDir, device: &str) -> Value {
    let place = match device {
        "nvme" => json!({"device": device, "nvme_path": dir.path()}),
        _ => json!({"device": device}),
    };
    json!({
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 8,
        "zero_optimization": {"offload_param": place, "offload_optimizer": place},
        "model": {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 2},
        "data": {"files": ["text"]},
        "offload": {"tile_elems": 4096},
        "train": {"steps": 1, "seq_len": 64, "run_dir": dir.path().join("run"), "device": "cpu"},
    })
}

/// A run of two ranks of which the other one says something else in some calls of `agree`.
fn prepared(dir: &TempDir, device: &str, nodes: u32, says: Says) -> PreparedRun {
    let mut settings = check(tree(dir, device), "test", Some(2)).unwrap();
    settings.local_ranks = 2 / nodes;
    // Ranks tell each other their nodes first.
    let before = usize::from(nodes > 1);
    let says = says.into_iter().map(|(call, bytes)| (call + before, bytes));
    let group = WithOther::saying(says.collect());
    let ranks = match nodes {
        1 => Ranks::new(group),
        _ => Ranks::on_nodes(group, 0, 1).unwrap(),
    };
    let site = Site {
        ranks,
        ..Site::alone(dir.path()).unwrap()
    };
    PreparedRun::new(settings, &StartPoint::Fresh, site).unwrap()
}

/// The plan that a rank makes alone, and the run after the ranks agreed.
fn agreed(dir: &TempDir, device: &str, nodes: u32, says: Says) -> (Plan, PreparedRun) {
    let mut prepared = prepared(dir, device, nodes, says);
    let own = prepared.plan.clone();
    prepared.agree().unwrap();
    (own, prepared)
}

fn group(size: u64) -> (usize, Vec<u8>) {
    (0, size.to_le_bytes().to_vec())
}

#[test]
fn ranks_take_the_smallest_group_of_micro_batches() {
    let dir = tempfile::tempdir().unwrap();
    for (other, size) in [(8, 8), (4, 4), (1, 1), (16, 8)] {
        let (_, run) = agreed(&dir, "cpu", 1, vec![group(other)]);
        assert_eq!(run.plan.micro_batch_group, size);
    }
}

#[test]
fn a_smaller_group_brings_no_copy_back_for_which_another_node_has_no_room() {
    let dir = tempfile::tempdir().unwrap();
    let no_room = b"no room".to_vec();
    let why = [
        (2, (no_room.len() as u64).to_le_bytes().to_vec()),
        (3, no_room),
    ];
    for other in [8, 4] {
        let says = [vec![group(other)], why.to_vec()].concat();
        let (own, PreparedRun { plan, .. }) = agreed(&dir, "cpu", 2, says);
        assert!(own.copy_bytes > 0, "alone, it keeps a copy");
        assert_eq!(
            (plan.copy_bytes, plan.micro_batch_group),
            (0, other as usize)
        );
        assert!(plan.why_no_copy().contains("no room"));
    }
}

#[test]
fn block_inputs_are_on_drives_for_all_ranks_if_they_are_for_one() {
    let dir = tempfile::tempdir().unwrap();
    for (other, place) in [(0, InputsIn::Place), (1, InputsIn::Drives)] {
        let says = vec![(1, u64::to_le_bytes(other).to_vec())];
        let (own, run) = agreed(&dir, "nvme", 1, says);
        assert_eq!(own.inputs_in, InputsIn::Place, "alone, they fit");
        assert_eq!(run.plan.inputs_in, place);
        // The store has room for them.
        let needed = run.plan.store_files(&run.settings, &run.id.job);
        assert_eq!(run.files, needed);
        assert_eq!(run.plan.device_bytes() > own.device_bytes(), other == 1);
    }
}

#[test]
fn what_ranks_agree_on_is_refused_if_there_is_no_room_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let on_drives = vec![(1, u64::to_le_bytes(1).to_vec())];
    let mut run = prepared(&dir, "nvme", 1, on_drives);
    // As the files of an earlier start.
    run.plan.hardware.store_file_bytes = Some(1 << 20);
    run.plan.check().expect("alone, it has room");
    let said = run.agree().unwrap_err().to_string();
    assert!(said.contains("made without room"), "{said}");
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
}
