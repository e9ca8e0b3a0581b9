//! What a job of a store is, for people: its tiles, its generations, where its ranks stand. Cheap to make: what is large is
//! shared.

use std::sync::Arc;

use offload_api::ids::{Generation, Rank};

use super::catalog::Entry;
use super::definition::{JobDefinition, JobName};
use super::manifest::{Mark, SlotContent, Version, resumable};
use super::recover::RecoveredJob;

/// A job.
#[derive(Clone, Debug)]
pub struct JobContent {
    /// Owner.
    pub uid: u32,
    /// With `uid` it names the job.
    pub name: JobName,
    /// Unique for ever in its store.
    pub job_id: u64,
    /// Over all devices.
    pub reserved_bytes: u64,
    /// Tiles, layout, durability, nodes.
    pub definition: Arc<JobDefinition>,
    /// That can be resumed from, oldest first, at most two.
    pub generations: Vec<GenerationContent>,
    /// Records that the device did not give, and why: one may be the newest.
    pub unreadable: Vec<String>,
}

/// A generation of it.
#[derive(Clone, Debug)]
pub struct GenerationContent {
    /// Its number.
    pub generation: Generation,
    /// Prepared on every node.
    pub confirmed: bool,
    /// Durability none: its tiles are being written over, or were when a daemon ended.
    pub overwriting: bool,
    /// By tile index; `None` = never written.
    pub versions: Arc<Vec<Option<Version>>>,
    /// By rank, as the ranks gave them.
    pub blobs: Arc<Vec<(Rank, Vec<u8>)>>,
}

impl JobContent {
    /// Of what is stored of a job.
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
        }
    }

    /// Bytes of all tiles that can be compared with a checksum; of two generations' common ones once.
    pub fn comparable_bytes(&self) -> u64 {
        let sound: Vec<_> = self
            .generations
            .iter()
            .filter(|one| !one.overwriting)
            .collect();
        let bytes = |(index, spec): (usize, &super::definition::TileSpec)| {
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

/// The step a rank's blob says it stands at. A blob is the job's own; the trainer's says `"step"` in JSON, and another's may
/// say nothing.
pub fn step_of(blob: &[u8]) -> Option<u64> {
    #[derive(serde::Deserialize)]
    struct Said {
        step: u64,
    }
    // A list of one number would do as well, and mean something else.
    if !blob.trim_ascii_start().starts_with(b"{") {
        return None;
    }
    let said: Said = serde_json::from_slice(blob).ok()?;
    Some(said.step)
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
        // As deep as a blob can be: an error, not a stack that ends.
        assert_eq!(step_of(&[b'['; 65536]), None);
    }
}
