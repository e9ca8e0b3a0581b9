//! Errors that these tests find: a node misses bytes of a file, or has other ones; a node waits for one that has failed; a node that
//! took no part counts as if it had; a checkpoint of given-up steps is resumed from; a copy passes for the run's own state.
//!
//! The nodes are threads with a directory each.

use super::*;
use crate::ranks::tests::on_ranks;
use crate::run::copies::Source;
use crate::run::{RunDescription, RunState, TileWriter};
use serde_json::json;
use swapper::TileRange;

/// Longer than a round, and no multiple of it.
const LONG: usize = (4 << 20) + 12_345;

struct Nodes {
    /// Holds the nodes' directories `0`, `1`, ...
    root: tempfile::TempDir,
    count: usize,
}

impl Nodes {
    fn new(count: usize) -> Self {
        let root = tempfile::tempdir().unwrap();
        for node in 0..count {
            fs::create_dir(root.path().join(node.to_string())).unwrap();
        }
        Self { root, count }
    }

    fn dir(&self, node: usize) -> PathBuf {
        fs::canonicalize(self.root.path())
            .unwrap()
            .join(node.to_string())
    }

    fn checkpoints(&self, node: usize) -> Checkpoints {
        Checkpoints::in_run_dir(&self.dir(node))
    }

    /// Does `work` on all nodes at once.
    fn each<T: Send>(&self, work: impl Fn(NodeDirs, usize) -> T + Sync) -> Vec<T> {
        on_ranks(self.count, |ranks| {
            let node = ranks.rank() as usize;
            work(NodeDirs::new(ranks, &self.dir(node)), node)
        })
    }

    /// Texts of the errors of all nodes.
    fn errors(
        &self,
        work: impl Fn(NodeDirs, usize) -> Result<(), CheckpointError> + Sync,
    ) -> Vec<String> {
        let ended = self.each(work);
        ended
            .into_iter()
            .map(|ended| ended.unwrap_err().to_string())
            .collect()
    }

    /// Describes a run of the name `job`, begun at `begun_unix_ms`, in the directory of `node`.
    fn describe(&self, node: usize, job: &str, begun_unix_ms: u64) {
        let dir = self.dir(node);
        let id = json!({"job": job, "dir": dir});
        fs::write(dir.join("job"), id.to_string()).unwrap();
        let id: RunId = serde_json::from_value(id).unwrap();
        let run = RunDir::open(&dir, &id).unwrap();
        run.describe(&RunDescription {
            layout: json!({"tile_elems": 10}),
            store: "in the run directory".into(),
            files: vec!["/drive/store.tiles".into()],
            socket: None,
            first_weights: json!(null),
            id: Some(id),
            nodes: 2,
            begun_unix_ms,
        })
        .unwrap();
    }

    /// Makes a checkpoint of `step` on all nodes of `dirs`, with one rank each. `tell` differs between two checkpoints of a step.
    fn finish(&self, dirs: &NodeDirs, step: u64, tell: u64) -> Result<PathBuf, CheckpointError> {
        let node = dirs.me() as u32;
        dirs.checkpoints.begin(step, 1000, false)?;
        let file = write(&dirs.checkpoints, step, node);
        let own = dirs.nodes.messages(serde_json::to_vec(&file).unwrap())?;
        let files = own.iter().map(|file| serde_json::from_slice(file).unwrap());
        let description = describe(step, tell, files.collect());
        dirs.finish(step, (node == 0).then_some(&description), &[file])
    }

    /// Makes a checkpoint of one file on `node` alone.
    fn alone(&self, node: usize, step: u64, tell: u64) {
        let checkpoints = self.checkpoints(node);
        checkpoints.begin(step, 1000, false).unwrap();
        let file = write(&checkpoints, step, 0);
        checkpoints
            .finish(&describe(step, tell, vec![file]))
            .unwrap();
    }

    fn meet(&self, dirs: &NodeDirs) -> HeldByNodes {
        dirs.meet(&NodeContents::read(&dirs.run_dir).unwrap())
            .unwrap()
    }

    /// Names and contents of the files in a checkpoint on `node`.
    fn files(&self, node: usize, step: u64) -> Vec<(String, Vec<u8>)> {
        let path = self.checkpoints(node).at(step).unwrap();
        let files = fs::read_dir(path).unwrap().map(|file| file.unwrap());
        let mut files: Vec<(String, Vec<u8>)> = files
            .map(|file| {
                (
                    file.file_name().into_string().unwrap(),
                    fs::read(file.path()).unwrap(),
                )
            })
            .collect();
        files.sort();
        files
    }

    fn steps(&self, node: usize) -> Vec<u64> {
        let list = self.checkpoints(node).list().unwrap();
        list.iter().map(|checkpoint| checkpoint.step).collect()
    }
}

/// Writes the file of `rank`, which is longer on higher ranks.
fn write(checkpoints: &Checkpoints, step: u64, rank: u32) -> SavedFile {
    let mut writer = TileWriter::create(&checkpoints.partial(step), rank).unwrap();
    let range = TileRange {
        unit: rank as usize,
        elems: 0..10,
    };
    let bytes = (0..LONG * rank as usize + 20).map(|i| (i * 31 + i / 256) as u8 ^ step as u8);
    writer
        .add(&range, &bytes.collect::<Vec<u8>>(), &[7; 5])
        .unwrap();
    writer.finish().unwrap()
}

fn describe(step: u64, tell: u64, files: Vec<SavedFile>) -> CheckpointDescription {
    CheckpointDescription {
        step,
        unix_s: tell,
        layout: json!({"tile_elems": 10}),
        state: serde_json::to_value(RunState::new(step, json!(null))).unwrap(),
        files,
    }
}

fn of_bytes(name: &str, bytes: &[u8]) -> SentFile {
    SentFile::from_contents(name.into(), bytes.to_vec())
}

#[test]
fn every_node_gets_the_files_that_it_lacks() {
    let nodes = Nodes::new(3);
    let long: Vec<u8> = (0..2 * LONG).map(|i| (i / 7) as u8).collect();
    let there = nodes.dir(2).join("same");
    fs::write(&there, b"same").unwrap();
    fs::write(nodes.dir(1).join("other"), b"otheR").unwrap();
    let before = fs::metadata(&there).unwrap().modified().unwrap();
    nodes.each(|dirs, node| {
        let own = match node {
            0 => vec![of_bytes("same", b"same"), of_bytes("a/b/long", &long)],
            1 => vec![],
            _ => vec![
                of_bytes("empty", b""),
                of_bytes("other", b"other"),
                of_bytes("last", b""),
            ],
        };
        copy(&dirs.nodes, &dirs.run_dir, Ok(own), node != 0).unwrap();
    });
    let read = |node: usize, name: &str| fs::read(nodes.dir(node).join(name)).unwrap();
    for node in [1, 2] {
        assert!(
            read(node, "same") == b"same" && read(node, "a/b/long") == long,
            "{node}"
        );
    }
    for (name, bytes) in [("empty", &b""[..]), ("other", b"other"), ("last", b"")] {
        assert_eq!(read(1, name), bytes);
    }
    assert_eq!(fs::metadata(&there).unwrap().modified().unwrap(), before);
    // The first node wanted none; nothing else is left.
    assert_eq!(fs::read_dir(nodes.dir(0)).unwrap().count(), 0);
    assert_eq!(fs::read_dir(nodes.dir(2)).unwrap().count(), 2);
}

#[test]
fn a_name_outside_the_directory_is_refused() {
    let nodes = Nodes::new(2);
    for name in ["../outside", "/outside"] {
        let errors = nodes.errors(|dirs, node| {
            let own = if node == 0 {
                vec![of_bytes(name, b"x")]
            } else {
                vec![]
            };
            copy(&dirs.nodes, &dirs.run_dir, Ok(own), true)
        });
        assert!(
            errors
                .iter()
                .all(|error| error.contains("leads out of the directory")),
            "{errors:?}"
        );
    }
    assert!(!nodes.root.path().join("outside").exists());
}

#[test]
fn a_failure_in_the_middle_ends_the_copying_on_all_nodes_and_is_named() {
    let nodes = Nodes::new(3);
    let copy_all = |dirs: NodeDirs, node: usize| {
        let own = vec![of_bytes(
            &format!("from-{node}"),
            &vec![node as u8; 2 * LONG],
        )];
        copy(&dirs.nodes, &dirs.run_dir, Ok(own), true)
    };
    // The second node's drive is full.
    let full = nodes.dir(1).join("from-2.new");
    std::os::unix::fs::symlink("/dev/full", &full).unwrap();
    let errors = nodes.errors(copy_all);
    assert!(
        errors[1].contains("from-2 after its first 0 bytes: No space left"),
        "{errors:?}"
    );
    for node in [0, 2] {
        assert_eq!(errors[node], format!("node 1: {}", errors[1]));
    }
    fs::remove_file(&full).unwrap();
    // A file that becomes shorter while it is sent.
    let short = nodes.dir(0).join("short");
    fs::write(&short, vec![1; LONG]).unwrap();
    let errors = nodes.errors(|dirs, node| {
        let mut own = Vec::new();
        if node == 0 {
            let mut sent = of_bytes("long", &vec![1; 3 * LONG]);
            sent.source = Source::File(short.clone());
            own.push(sent);
        }
        copy(&dirs.nodes, &dirs.run_dir, Ok(own), true)
    });
    let end = format!(
        "cannot read the checkpoint {}: failed to fill whole buffer",
        short.display()
    );
    assert_eq!(errors[0], end);
    assert_eq!(errors[2], format!("node 0: {end}"));
    // One that failed before.
    let errors = nodes.errors(|dirs, node| {
        let failed = CheckpointError::damaged(Path::new("/before"), "it is");
        let own = if node == 2 {
            Err(failed)
        } else {
            Ok(vec![of_bytes("x", &[1; 9])])
        };
        copy(&dirs.nodes, &dirs.run_dir, own, true)
    });
    assert!(
        errors[0].starts_with("node 2: the checkpoint /before is damaged"),
        "{errors:?}"
    );
    for node in 0..3 {
        assert!(!nodes.dir(node).join("x").exists() && !nodes.dir(node).join("long").exists());
    }
    // All works afterwards.
    nodes.each(|dirs, node| copy_all(dirs, node).unwrap());
    assert_eq!(
        fs::read(nodes.dir(1).join("from-2")).unwrap(),
        vec![2; 2 * LONG]
    );
}

#[test]
fn a_checkpoint_becomes_the_same_on_every_node_with_the_runs_files() {
    let nodes = Nodes::new(3);
    nodes.describe(0, "run-1", 5);
    fs::write(nodes.dir(0).join("metrics.jsonl"), "{}\n").unwrap();
    fs::create_dir(nodes.dir(0).join("model")).unwrap();
    fs::write(nodes.dir(0).join("model/config.json"), "{}").unwrap();
    nodes.each(|dirs, _| nodes.finish(&dirs, 4, 1).unwrap());
    let first = nodes.files(0, 4);
    assert_eq!(first.len(), 4);
    for node in [1, 2] {
        assert!(nodes.files(node, 4) == first, "node {node}");
        for name in ["job", "metrics.jsonl", "model/config.json"] {
            let read = |node| fs::read(nodes.dir(node).join(name)).unwrap();
            assert_eq!(read(node), read(0), "{name}");
        }
        let described = RunDir::described(&nodes.dir(node)).unwrap().unwrap();
        let of = (
            described.nodes,
            described.files.len(),
            described.begun_unix_ms,
        );
        assert_eq!(of, (INCOMPLETE, 0, 5), "the state is the first node's");
    }
    // A byte that changed after it was written is noticed by the node that gets it.
    let errors = nodes.errors(|dirs, node| {
        dirs.checkpoints.begin(6, 1000, false)?;
        let file = write(&dirs.checkpoints, 6, node as u32);
        if node == 1 {
            let path = dirs.checkpoints.partial(6).join(&file.name);
            let mut bytes = fs::read(&path).unwrap();
            bytes[LONG] ^= 1;
            fs::write(&path, bytes).unwrap();
        }
        let description = describe(6, 1, vec![file.clone()]);
        dirs.finish(6, (node == 0).then_some(&description), &[file])
            .map(drop)
    });
    assert!(
        errors[0].contains("tiles.1 is damaged: node 1 sent bytes with fingerprint"),
        "{errors:?}"
    );
    assert_eq!(nodes.steps(0), [4]);
}

#[test]
fn a_node_that_lacks_a_checkpoint_gets_it_from_the_lowest_that_has_it() {
    let nodes = Nodes::new(3);
    for node in [0, 1, 2] {
        nodes.describe(node, "run-1", 5);
    }
    // As after a crash between two renames: only two nodes have the newest one, and two have other ones of a step.
    nodes.alone(1, 8, 1);
    nodes.alone(2, 8, 2);
    nodes.alone(0, 6, 1);
    // One without a file is not whole.
    nodes.alone(0, 8, 3);
    fs::remove_file(nodes.checkpoints(0).at(8).unwrap().join("tiles.0")).unwrap();
    let expected = nodes.files(1, 8);
    let said = std::sync::Mutex::new(Vec::new());
    nodes.each(|dirs, node| {
        let all = nodes.meet(&dirs);
        assert_eq!(all.newest(), Some(8));
        assert_eq!(dirs.update(&all).unwrap(), None);
        let say = |note| said.lock().unwrap().push((node, note));
        dirs.restore(&all, 8, &say).unwrap();
        dirs.restore(&nodes.meet(&dirs), 8, &|_| panic!("all have it"))
            .unwrap();
        dirs.restore(&all, 7, &|_| panic!("no node has it"))
            .unwrap();
    });
    for node in 0..3 {
        assert_eq!(nodes.files(node, 8), expected, "node {node}");
    }
    assert_eq!((nodes.steps(0), nodes.steps(1)), (vec![6, 8], vec![8]));
    let said = said.into_inner().unwrap();
    assert!(
        said[0].1.contains("of step 8, ") && said[0].1.contains(" from node 1 to node 0, 2"),
        "{said:?}"
    );
}

#[test]
fn a_damaged_or_too_large_checkpoint_changes_nothing() {
    let nodes = Nodes::new(2);
    nodes.describe(0, "run-1", 5);
    nodes.alone(0, 8, 1);
    let restore = |dirs: NodeDirs, all: &HeldByNodes| dirs.restore(all, 8, &|_| ());
    let errors = nodes.errors(|dirs, _| {
        let mut all = nodes.meet(&dirs);
        all.0[0].checkpoints[0].bytes = u64::MAX / 2;
        restore(dirs, &all)
    });
    assert!(
        errors[0].starts_with("node 1: the checkpoint ")
            && errors[0].contains(" free: free some space"),
        "{errors:?}"
    );
    let path = nodes.checkpoints(0).at(8).unwrap().join("tiles.0");
    let mut bytes = fs::read(&path).unwrap();
    bytes[30] ^= 1;
    fs::write(&path, bytes).unwrap();
    let errors = nodes.errors(|dirs, _| {
        let all = nodes.meet(&dirs);
        restore(dirs, &all)
    });
    assert!(
        errors[0].contains("node 0 sent bytes with fingerprint"),
        "{errors:?}"
    );
    assert!(nodes.steps(1).is_empty() && nodes.steps(0) == [8]);
    assert!(
        fs::read_dir(nodes.checkpoints(1).path())
            .unwrap()
            .next()
            .is_none(),
        "nothing is left"
    );
}

#[test]
fn what_a_node_holds_that_missed_a_beginning_does_not_count() {
    let nodes = Nodes::new(3);
    // The first node took no part when the others began at step 4 once more. The last one is new.
    nodes.describe(0, "run-1", 5);
    nodes.describe(1, "run-1", 9);
    for step in [2, 4, 100] {
        nodes.alone(0, step, 1);
    }
    fs::write(nodes.dir(0).join("metrics.jsonl"), "old").unwrap();
    fs::write(nodes.dir(1).join("metrics.jsonl"), "new").unwrap();
    nodes.alone(1, 4, 1);
    nodes.alone(1, 6, 2);
    nodes.each(|dirs, node| {
        let all = nodes.meet(&dirs);
        assert_eq!(all.newest(), Some(6));
        assert_eq!(dirs.update(&all).unwrap().is_some(), node == 0);
        assert_eq!(all.holder(100).map(|(node, _)| node), None, "moved aside");
        assert_eq!(
            all.holder(2).map(|(node, _)| node),
            Some(0),
            "asked for by its step"
        );
        assert_eq!(
            all.holder(4).map(|(node, _)| node),
            Some(1),
            "current nodes first"
        );
        dirs.restore(&all, 6, &|_| ()).unwrap();
    });
    assert_eq!((nodes.steps(0), nodes.steps(2)), (vec![2, 4, 6], vec![6]));
    let aside = nodes.checkpoints(0).list_aside().unwrap();
    assert_eq!(aside.len(), 1);
    assert_eq!(
        fs::read(aside[0].path.with_file_name("metrics.jsonl")).unwrap(),
        b"old"
    );
    for node in [0, 2] {
        assert_eq!(
            fs::read(nodes.dir(node).join("metrics.jsonl")).unwrap(),
            b"new"
        );
        let described = RunDir::described(&nodes.dir(node)).unwrap().unwrap();
        assert_eq!((described.nodes, described.begun_unix_ms), (INCOMPLETE, 9));
    }
    assert_eq!(RunDir::described(&nodes.dir(1)).unwrap().unwrap().nodes, 2);
}

#[test]
fn another_run_is_not_overwritten() {
    let nodes = Nodes::new(2);
    nodes.describe(0, "run-1", 5);
    nodes.describe(1, "run-2", 9);
    nodes.alone(0, 8, 1);
    nodes.each(|dirs, _| {
        let all = nodes.meet(&dirs);
        assert_eq!(dirs.update(&all).unwrap(), None);
    });
    assert_eq!(nodes.steps(0), [8]);
    assert_eq!(RunId::kept(&nodes.dir(0)).unwrap().job, "run-1");
}
