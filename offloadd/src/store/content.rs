//! Content of a store for people: tiles, generations and the steps of the ranks of each job. Cheap to make, because large parts
//! are shared.

use std::sync::Arc;

use offload_api::ids::{Generation, Rank};

use super::catalog::Entry;
use super::definition::{JobDefinition, JobName};
use super::manifest::{Mark, SlotContent, Version, resumable};
use super::recover::RecoveredJob;

#[derive(Clone, Debug)]
pub struct JobContent {
    /// Owner.
    pub uid: u32,
    /// Name of the job among its owner's jobs.
    pub name: JobName,
    /// Id in the store, never reused.
    pub job_id: u64,
    /// Reserved bytes over all devices.
    pub reserved_bytes: u64,
    /// Tiles, layout, durability and nodes.
    pub definition: Arc<JobDefinition>,
    /// Generations that can be resumed from, oldest first; at most two.
    pub generations: Vec<GenerationContent>,
    /// Why records could not be read; one of them may be the newest.
    pub unreadable: Vec<String>,
    /// Processes that have it open, by rank; 0 for one in another PID namespace.
    pub pids: Vec<u32>,
}

/// A generation of the job.
#[derive(Clone, Debug)]
pub struct GenerationContent {
    /// Number of the generation.
    pub generation: Generation,
    /// Whether it is prepared on every node.
    pub confirmed: bool,
    /// Without durability: whether its tiles are being overwritten, or were when a daemon ended.
    pub overwriting: bool,
    /// Version of each tile; `None` if never written.
    pub versions: Arc<Vec<Option<Version>>>,
    /// Blobs by rank.
    pub blobs: Arc<Vec<(Rank, Vec<u8>)>>,
}

impl JobContent {
    /// Describes the stored parts of a job, which nobody has open.
    pub fn new(entry: &Entry, definition: &Arc<JobDefinition>, slots: &[SlotContent; 2]) -> Self {
        let generations = resumable(slots)
            .into_iter()
            .map(|marked| GenerationContent {
                generation: marked.record.generation,
                confirmed: marked.confirmed(),
                overwriting: marked.mark == Some(Mark::Overwriting),
                versions: marked.record.versions.clone(),
                blobs: marked.record.blobs.clone(),
            });
        let unreadable = slots.iter().filter_map(|slot| match slot {
            SlotContent::Unreadable(why) => Some(why.clone()),
            SlotContent::Empty | SlotContent::Unknown | SlotContent::Sound(_) => None,
        });
        Self {
            uid: entry.uid,
            name: entry.name.clone(),
            job_id: entry.job_id,
            reserved_bytes: entry.reserved_bytes,
            definition: definition.clone(),
            generations: generations.collect(),
            unreadable: unreadable.collect(),
            pids: Vec::new(),
        }
    }

    /// Bytes of all tiles with a checksum, those shared by two generations counted once.
    pub fn comparable_bytes(&self) -> u64 {
        let sound: Vec<_> = self
            .generations
            .iter()
            .filter(|one| !one.overwriting)
            .collect();
        let bytes = |(index, spec): (usize, &super::definition::Tile)| {
            let mut versions: Vec<_> = sound.iter().filter_map(|one| one.versions[index]).collect();
            versions.dedup();
            versions.len() as u64 * u64::from(spec.tile_bytes)
        };
        self.definition.tiles().iter().enumerate().map(bytes).sum()
    }
}

impl From<&RecoveredJob> for JobContent {
    fn from(job: &RecoveredJob) -> Self {
        Self::new(&job.entry, &job.table.definition, &job.slots)
    }
}

/// Returns the step in a rank's blob. The trainer's blobs have `"step"` in JSON; blobs of other programs may have none.
pub fn step_of(blob: &[u8]) -> Option<u64> {
    #[derive(serde::Deserialize)]
    struct RunState {
        step: u64,
    }
    // A JSON list of one number would also parse, and mean something else.
    if !blob.trim_ascii_start().starts_with(b"{") {
        return None;
    }
    let state: RunState = serde_json::from_slice(blob).ok()?;
    Some(state.step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blob_may_say_its_step_or_be_anything_else() {
        assert_eq!(step_of(br#"{"version":1,"step":42,"lr":0.1}"#), Some(42));
        for other in [
            &b""[..],
            b"\xff\xfe",
            b"{}",
            b"[42]",
            br#"{"step":"x"}"#,
            br#"{"step":-1}"#,
        ] {
            assert_eq!(step_of(other), None);
        }
        // Nested as deeply as a blob can be: an error, not a stack overflow.
        assert_eq!(step_of(&[b'['; 65536]), None);
    }
}
