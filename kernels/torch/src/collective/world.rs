//! This process's rank, from torchrun's variables.

use super::CollectiveError;

/// Most ranks of a run. Refuses a mistyped WORLD_SIZE before memory is allocated for it.
const RANKS_MAX: u32 = 4096;

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

impl World {
    /// A run of one process.
    pub const ALONE: World = World {
        rank: 0,
        ranks: 1,
        local_rank: 0,
        local_ranks: 1,
    };

    /// Reads `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and `LOCAL_WORLD_SIZE`, which torchrun and `trainer launch` set.
    /// Without the first two the process runs alone.
    ///
    /// # Errors
    /// A variable is missing beside the others, is not a number, or contradicts them.
    pub fn from_env() -> Result<World, CollectiveError> {
        World::from_variables(&mut |name| std::env::var_os(name).map(lossy))
    }

    /// Like [`World::from_env`], with the variables from `get`.
    pub fn from_variables(
        get: &mut dyn FnMut(&str) -> Option<String>,
    ) -> Result<World, CollectiveError> {
        let (rank, ranks) = match (get("RANK"), get("WORLD_SIZE")) {
            (None, None) => return Ok(World::ALONE),
            (rank, ranks) => (
                number("RANK", rank, 0, u32::MAX)?,
                number("WORLD_SIZE", ranks, 1, RANKS_MAX)?,
            ),
        };
        let (local_rank, local_ranks) = match (get("LOCAL_RANK"), get("LOCAL_WORLD_SIZE")) {
            // A node with one process needs no local rank.
            (None, None) if ranks == 1 => (0, 1),
            (local_rank, local_ranks) => (
                number("LOCAL_RANK", local_rank, 0, u32::MAX)?,
                number("LOCAL_WORLD_SIZE", local_ranks, 1, RANKS_MAX)?,
            ),
        };
        below("RANK", rank, "WORLD_SIZE", ranks)?;
        below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_ranks)?;
        if local_ranks > ranks {
            return Err(CollectiveError::Environment {
                name: "LOCAL_WORLD_SIZE",
                value: local_ranks.to_string(),
                problem: format!("exceeds WORLD_SIZE, {ranks}"),
            });
        }
        if local_ranks == ranks && local_rank != rank {
            return Err(CollectiveError::Environment {
                name: "LOCAL_RANK",
                value: local_rank.to_string(),
                problem: format!(
                    "differs from RANK, {rank}, although all processes are on this node"
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
) -> Result<u32, CollectiveError> {
    let value = value.ok_or(CollectiveError::Missing { name })?;
    match value.parse::<u32>() {
        // `parse` accepts a sign; torchrun writes none.
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

    /// The variables as torchrun sets them, with some changed (`None`: removed).
    fn world(changes: &[(&str, Option<&str>)]) -> Result<World, String> {
        let mut variables = [
            ("RANK", Some("5")),
            ("WORLD_SIZE", Some("8")),
            ("LOCAL_RANK", Some("1")),
            ("LOCAL_WORLD_SIZE", Some("4")),
        ];
        for (name, value) in changes {
            variables
                .iter_mut()
                .find(|(known, _)| known == name)
                .expect("a known name")
                .1 = *value;
        }
        World::from_variables(&mut |name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.and_then(|(_, value)| value.map(str::to_owned))
        })
        .map_err(|error| error.to_string())
    }

    #[test]
    fn torchruns_variables_say_who_this_is() {
        let found = world(&[]).unwrap();
        assert_eq!(
            found,
            World {
                rank: 5,
                ranks: 8,
                local_rank: 1,
                local_ranks: 4
            }
        );
        assert!(!found.one_node());
    }

    #[test]
    fn a_process_without_the_variables_is_alone() {
        let alone = [("RANK", None), ("WORLD_SIZE", None)];
        assert_eq!(world(&alone).unwrap(), World::ALONE);
        let local_missing = [
            ("RANK", Some("0")),
            ("WORLD_SIZE", Some("1")),
            ("LOCAL_RANK", None),
            ("LOCAL_WORLD_SIZE", None),
        ];
        assert_eq!(world(&local_missing).unwrap(), World::ALONE);
        assert!(World::ALONE.one_node());
    }

    #[test]
    fn a_variable_missing_beside_the_others_is_named() {
        for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"] {
            let error = world(&[(name, None)]).unwrap_err();
            assert!(error.contains(&format!("{name} is not set")), "{error}");
        }
    }

    #[test]
    fn a_value_that_is_no_count_is_named() {
        for value in ["", "x", "-1", "+5", " 5", "5.0", "4294967296", "٥"] {
            for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"] {
                let error = world(&[(name, Some(value))]).unwrap_err();
                assert!(error.contains(name), "{name}={value}: {error}");
                assert!(error.contains("not a number"), "{name}={value}: {error}");
            }
        }
        let error = world(&[("WORLD_SIZE", Some("0"))]).unwrap_err();
        assert!(error.contains("not a number from 1"), "{error}");
        let error = world(&[("WORLD_SIZE", Some("1000000000"))]).unwrap_err();
        assert!(error.contains("4096"), "{error}");
    }

    #[test]
    fn values_that_do_not_fit_together_are_refused() {
        let error = world(&[("RANK", Some("8"))]).unwrap_err();
        assert!(error.contains("not below WORLD_SIZE, 8"), "{error}");
        let error = world(&[("LOCAL_RANK", Some("4"))]).unwrap_err();
        assert!(error.contains("not below LOCAL_WORLD_SIZE, 4"), "{error}");
        let error = world(&[("LOCAL_WORLD_SIZE", Some("9"))]).unwrap_err();
        assert!(error.contains("exceeds WORLD_SIZE"), "{error}");
        let error = world(&[("LOCAL_WORLD_SIZE", Some("8"))]).unwrap_err();
        assert!(error.contains("differs from RANK, 5"), "{error}");
    }
}
