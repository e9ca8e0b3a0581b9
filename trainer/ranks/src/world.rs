//! This process among all processes of a run.

use super::CollectiveError;

/// Most ranks of a run. Refuses a mistyped WORLD_SIZE before memory is allocated for it.
pub(super) const RANKS_MAX: u32 = 4096;

/// This process among all processes of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct World {
    /// Number of this process, from 0.
    pub rank: u32,
    /// Processes of the run.
    pub ranks: u32,
    /// Number of this process on its node, from 0: selects its GPU.
    pub local_rank: u32,
    /// Processes on this node.
    pub local_ranks: u32,
}

/// Names of the variables of one program that starts ranks.
pub(super) struct Names {
    pub(super) rank: &'static str,
    pub(super) ranks: &'static str,
    pub(super) local_rank: &'static str,
    pub(super) local_ranks: &'static str,
    /// How to get a variable that is missing.
    pub(super) help: &'static str,
}

impl World {
    /// A run of one process.
    pub const ALONE: World = World {
        rank: 0,
        ranks: 1,
        local_rank: 0,
        local_ranks: 1,
    };

    /// Checks that the numbers fit together.
    pub(super) fn checked(
        names: &Names,
        rank: u32,
        ranks: u32,
        local_rank: u32,
        local_ranks: u32,
    ) -> Result<World, CollectiveError> {
        below(names.rank, rank, names.ranks, ranks)?;
        below(names.local_rank, local_rank, names.local_ranks, local_ranks)?;
        if local_ranks > ranks {
            return Err(CollectiveError::Environment {
                name: names.local_ranks,
                value: local_ranks.to_string(),
                problem: format!("exceeds {}, {ranks}", names.ranks),
            });
        }
        if local_ranks == ranks && local_rank != rank {
            return Err(CollectiveError::Environment {
                name: names.local_rank,
                value: local_rank.to_string(),
                problem: format!(
                    "differs from {}, {rank}, although all processes are on this node",
                    names.rank
                ),
            });
        }
        Ok(World {
            rank,
            ranks,
            local_rank,
            local_ranks,
        })
    }

    /// This process among those of its node alone.
    pub fn of_node(&self) -> World {
        World {
            rank: self.local_rank,
            ranks: self.local_ranks,
            ..*self
        }
    }

    /// This process among the `count` neighbouring ones that it belongs to.
    ///
    /// Panics if `ranks` is not a multiple of `count`.
    pub fn of_neighbours(&self, count: u32) -> World {
        assert!(
            count > 0 && self.ranks.is_multiple_of(count),
            "{} ranks are no groups of {count}",
            self.ranks
        );
        let rank = self.rank % count;
        let first_of_node = self.rank - self.local_rank;
        let first = self.rank - rank;
        let are_here = first >= first_of_node && first + count <= first_of_node + self.local_ranks;
        let (local_rank, local_ranks) = match are_here {
            true => (rank, count),
            // On several nodes; how many are here matters to nobody.
            false => (0, 1),
        };
        World {
            rank,
            ranks: count,
            local_rank,
            local_ranks,
        }
    }

    /// Rank `rank` of two ranks on one node.
    #[cfg(test)]
    pub(super) fn of_two(rank: u32) -> World {
        World {
            rank,
            ranks: 2,
            local_rank: rank,
            local_ranks: 2,
        }
    }

    /// Whether all processes of the run are on this node.
    pub fn one_node(&self) -> bool {
        self.local_ranks == self.ranks
    }
}

/// A value that is not UTF-8 is refused where it is parsed.
pub(super) fn lossy(value: std::ffi::OsString) -> String {
    value.to_string_lossy().into_owned()
}

/// Parses a number within bounds.
pub(super) fn number(
    name: &'static str,
    value: Option<String>,
    min: u32,
    max: u32,
    help: &'static str,
) -> Result<u32, CollectiveError> {
    let value = value.ok_or(CollectiveError::Missing { name, help })?;
    match value.parse::<u32>() {
        // `parse` accepts a sign; no launcher writes one.
        Ok(number) if (min..=max).contains(&number) && !value.starts_with('+') => Ok(number),
        _ => Err(CollectiveError::Environment {
            name,
            value,
            problem: format!("is not a number from {min} to {max}"),
        }),
    }
}

fn below(
    name: &'static str,
    value: u32,
    limit_name: &'static str,
    limit: u32,
) -> Result<(), CollectiveError> {
    if value < limit {
        return Ok(());
    }
    Err(CollectiveError::Environment {
        name,
        value: value.to_string(),
        problem: format!("is not below {limit_name}, {limit}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_on_one_node_or_on_several() {
        let world = |rank, local_rank, local_ranks| World {
            rank,
            ranks: 8,
            local_rank,
            local_ranks,
        };
        for (of, count, expected) in [
            (world(5, 5, 8), 2, (1, 2, 1, 2)),
            (world(5, 1, 4), 4, (1, 4, 1, 4)),
            // Two nodes of four ranks.
            (world(5, 1, 4), 8, (5, 8, 0, 1)),
            (world(5, 1, 4), 1, (0, 1, 0, 1)),
            // Four nodes of two ranks.
            (world(5, 1, 2), 4, (1, 4, 0, 1)),
        ] {
            let World {
                rank,
                ranks,
                local_rank,
                local_ranks,
            } = of.of_neighbours(count);
            assert_eq!(
                (rank, ranks, local_rank, local_ranks),
                expected,
                "{of:?}, {count}"
            );
        }
    }
}
