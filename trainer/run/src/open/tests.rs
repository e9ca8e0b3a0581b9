//! Tests of what ranks must choose alike.

use std::sync::{Arc, Mutex};

use serde_json::json;
use training_state::ranks::{Group, GroupError};

use super::*;
use crate::config::check;

/// The call in which ranks tell each other their group: after why they keep no copy, in two calls.
const GROUP_CALL: usize = 2;

/// The first of two ranks, whose other says the same but for its group of micro-batches.
struct WithOther {
    group: u64,
    calls: Mutex<usize>,
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
        *calls += 1;
        let other = match *calls - 1 {
            GROUP_CALL => self.group.to_le_bytes().to_vec(),
            _ => own.to_vec(),
        };
        Ok(vec![own.to_vec(), other])
    }
}

#[test]
fn ranks_take_the_smallest_group_of_micro_batches() {
    let dir = tempfile::tempdir().unwrap();
    let tree = json!({
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 8,
        "zero_optimization": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
        "model": {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 2},
        "data": {"files": ["text"]},
        "train": {"steps": 1, "seq_len": 64, "run_dir": dir.path().join("run"), "device": "cpu"},
    });
    for (other, agreed) in [(8, 8), (4, 4), (1, 1), (16, 8)] {
        let settings = check(tree.clone(), "test", Some(2)).unwrap();
        let other = WithOther {
            group: other,
            calls: Mutex::new(0),
        };
        let site = Site {
            ranks: Ranks::new(Arc::new(other)),
            ..Site::alone(dir.path()).unwrap()
        };
        let mut prepared = PreparedRun::new(settings, &StartPoint::Fresh, site).unwrap();
        prepared.agree().unwrap();
        assert_eq!(prepared.plan.micro_batch_group, agreed);
    }
}
