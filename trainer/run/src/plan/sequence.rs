//! Exchanges between ranks that divide each sequence among themselves: what they send, and how long it takes.
//!
//! ```text
//!   a block   forward    query, key and value to the ranks of their heads, the attention output back: 4 tensors of a rank's tokens
//!             backward   their gradients: 4 tensors; and those of forward again if it is recomputed
//! ```
//!
//! Nothing is computed meanwhile.

use serde::Serialize;

use super::Plan;
use crate::computation::{ActivationCheckpointing, Checkpointing, exchanged_widths};
use crate::config::RunSettings;

/// Bytes that a process sends in a step to the others with which it divides each sequence, and receives from them; 0 for whole sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SequenceExchange {
    pub forward_bytes: u64,
    pub backward_bytes: u64,
}

impl SequenceExchange {
    /// Counts elements of the model's type.
    pub(super) fn new(settings: &RunSettings, checkpointing: Checkpointing) -> Self {
        let (model, batch) = (&settings.model, &settings.batch);
        let ranks = u64::from(batch.sequence_ranks);
        let widths = exchanged_widths(model, ranks as usize);
        let elems = batch.tokens() * widths.iter().sum::<u64>();
        let all = elems * (model.layers * settings.dtype.elem_bytes()) as u64;
        // A rank keeps its own part.
        let forward_bytes = all * (ranks - 1) / ranks;
        let again = checkpointing.sum(model.layers, |level| match level {
            ActivationCheckpointing::Full => 1.0,
            ActivationCheckpointing::Attention | ActivationCheckpointing::Matmuls => 0.0,
        });
        let again = again / model.layers as f64;
        Self {
            forward_bytes,
            backward_bytes: forward_bytes + (forward_bytes as f64 * again) as u64,
        }
    }

    /// Sum of both passes.
    pub fn sum_bytes(&self) -> u64 {
        self.forward_bytes + self.backward_bytes
    }
}

impl Plan {
    /// Ranks of a sequence that are on the node of each.
    fn sequence_ranks_here(&self) -> u32 {
        (1..=self.sequence_ranks.min(self.local_ranks))
            .rev()
            .find(|here| {
                self.sequence_ranks.is_multiple_of(*here) && self.local_ranks.is_multiple_of(*here)
            })
            .expect("1 divides every number")
    }

    /// Part of what a process exchanges that goes to other nodes.
    fn elsewhere_fraction(&self) -> f64 {
        match self.sequence_ranks {
            1 => 0.0,
            ranks => f64::from(ranks - self.sequence_ranks_here()) / f64::from(ranks - 1),
        }
    }

    /// Bytes that the processes of a node send to those of other nodes for their sequences, in a step.
    pub(super) fn exchanged_network_bytes(&self) -> u64 {
        let of_process = self.exchange.sum_bytes() as f64 * self.elsewhere_fraction();
        (of_process * f64::from(self.local_ranks)) as u64
    }

    /// Time of exchanging `bytes`: on one node over the bus of the GPU, which is slower than a link between GPUs; between nodes over their
    /// network. Between processors of one node it does not count beside computing there.
    pub(super) fn exchange_s(&self, bytes: u64) -> f64 {
        let elsewhere = self.elsewhere_fraction();
        let network_bytes_per_s =
            self.hardware.network_bytes_per_s.value / f64::from(self.local_ranks);
        let network_s = bytes as f64 * elsewhere / network_bytes_per_s;
        let here_s = match &self.hardware.gpu {
            Some(gpu) => bytes as f64 * (1.0 - elsewhere) / gpu.bus_bytes_per_s.value,
            None => 0.0,
        };
        network_s.max(here_s)
    }
}
