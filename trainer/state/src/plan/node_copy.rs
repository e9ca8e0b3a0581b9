//! A copy of all parameters that the ranks of each of several nodes keep together in host memory, so that backward need not gather over
//! the network what forward has brought.

use std::fmt;

use offload_support::units::ApproxBytes;

use super::choose::without_host_margin;

/// Why the nodes keep no copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoNodeCopy {
    /// The copy of a node would take so many bytes.
    HostMemory { node_bytes: u64 },
    /// The ranks of a node cannot divide this unit equally.
    Unequal { unit: String, local_ranks: u64 },
}

impl fmt::Display for NoNodeCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HostMemory { node_bytes } => write!(
                f,
                "host memory has no room for a copy of all parameters on each node, {}",
                ApproxBytes(*node_bytes)
            ),
            Self::Unequal { unit, local_ranks } => {
                write!(f, "{local_ranks} ranks cannot keep equal parts of {unit}")
            }
        }
    }
}

/// A script's rank that may keep a part of a copy.
#[derive(Clone, Copy, Debug)]
pub struct ScriptRank {
    /// Ranks of this node.
    pub local_ranks: u64,
    /// Whether PyTorch pins the parts, in sizes that are powers of two.
    pub pins: bool,
    /// Host memory that the rank takes without a copy.
    pub host_bytes: u64,
    /// Host memory that the node has free; `None` if the kernel does not say.
    pub available_bytes: Option<u64>,
}

impl ScriptRank {
    /// Returns the bytes of this rank's part of a copy of `units`: each with its name, and its bytes on all ranks.
    ///
    /// # Errors
    /// Why the nodes keep no copy.
    pub fn copy_bytes(&self, units: Vec<(String, u64)>) -> Result<u64, NoNodeCopy> {
        let local_ranks = self.local_ranks;
        let mut sum = 0;
        for (unit, bytes) in units {
            if !bytes.is_multiple_of(local_ranks) {
                return Err(NoNodeCopy::Unequal { unit, local_ranks });
            }
            let part = bytes / local_ranks;
            sum += if self.pins {
                part.next_power_of_two()
            } else {
                part
            };
        }
        let free = self.available_bytes.map_or(u64::MAX, without_host_margin);
        if local_ranks * (self.host_bytes + sum) > free {
            let node_bytes = local_ranks * sum;
            return Err(NoNodeCopy::HostMemory { node_bytes });
        }
        Ok(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANK: ScriptRank = ScriptRank {
        local_ranks: 2,
        pins: false,
        host_bytes: 100,
        available_bytes: Some(1000),
    };

    fn units(bytes: &[u64]) -> Vec<(String, u64)> {
        let named = |(index, bytes): (usize, &u64)| (format!("block {index}"), *bytes);
        bytes.iter().enumerate().map(named).collect()
    }

    #[test]
    fn a_copy_fits_if_a_tenth_of_the_nodes_memory_stays_free() {
        assert_eq!(RANK.copy_bytes(units(&[200, 500])), Ok(350));
        let refused = RANK.copy_bytes(units(&[200, 502]));
        assert_eq!(refused, Err(NoNodeCopy::HostMemory { node_bytes: 702 }));
        let unknown = ScriptRank {
            available_bytes: None,
            ..RANK
        };
        assert_eq!(unknown.copy_bytes(units(&[1 << 40])), Ok(1 << 39));
    }

    #[test]
    fn pinned_parts_are_powers_of_two() {
        let pinned = ScriptRank { pins: true, ..RANK };
        assert_eq!(pinned.copy_bytes(units(&[128, 130])), Ok(64 + 128));
    }

    #[test]
    fn a_unit_that_ranks_cannot_divide_is_named() {
        let why = RANK.copy_bytes(units(&[200, 7])).unwrap_err();
        assert_eq!(
            why.to_string(),
            "2 ranks cannot keep equal parts of block 1"
        );
    }
}
