//! Errors between ranks. They name the responsible rank.

/// Errors between ranks.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CollectiveError {
    /// An environment variable is missing although others that belong to it are set.
    #[error("{name} is not set: {help}")]
    Missing {
        /// The variable.
        name: &'static str,
        /// How to get it set.
        help: &'static str,
    },
    /// An environment variable has an invalid value.
    #[error(
        "{name}={value:?} {problem}; `trainer launch`, torchrun and srun set variables that fit together"
    )]
    Environment {
        /// The variable.
        name: &'static str,
        /// Value of the variable.
        value: String,
        /// Why the value is invalid.
        problem: String,
    },
    /// The job token in the environment is unusable. The message does not repeat the token.
    #[error("OFFLOADD_JOB_TOKEN {problem}")]
    Token {
        /// Why the token is unusable.
        problem: &'static str,
    },
    /// The directory or address of the rendezvous cannot be used.
    #[error("{op} at the rendezvous {place} failed: {message}")]
    Rendezvous {
        /// The operation.
        op: &'static str,
        /// Directory, or host and port.
        place: String,
        /// The system's or torch's message.
        message: String,
    },
    /// Two processes have the same rank, or a directory was used before.
    #[error(
        "rank {rank} is taken at the rendezvous {place}: two processes have RANK={rank}, or it was used by an earlier launch and must be a fresh one"
    )]
    Taken {
        /// The rank.
        rank: u32,
        /// Directory, or host and port.
        place: String,
    },
    /// Not all ranks came to the rendezvous.
    #[error(
        "after {waited_s:.0} s rank{} {} still missing at the rendezvous {place}: check their output, and whether they were started",
        list(ranks), if ranks.len() == 1 { "is" } else { "are" }
    )]
    Absent {
        /// The missing ranks.
        ranks: Vec<u32>,
        /// Seconds waited.
        waited_s: f64,
        /// Directory, or host and port.
        place: String,
    },
    /// A rank's process is dead.
    #[error(
        "rank {rank} died (noticed in {op}): check its last output, and whether it was killed or ran out of memory"
    )]
    Died {
        /// The rank that died.
        rank: u32,
        /// The operation in which this rank noticed it.
        op: String,
    },
    /// A rank sends no heartbeat.
    #[error(
        "rank {rank} has not answered for {silent_s:.1} s (noticed in {op}): its process is stopped, or its node or network is down"
    )]
    Silent {
        /// The rank that does not answer.
        rank: u32,
        /// Seconds since its last heartbeat.
        silent_s: f64,
        /// The operation in which this rank noticed it.
        op: String,
    },
    /// A rank gave up, or ended before the others.
    #[error("rank {rank} ended while rank {waiting} waited for it in {op}: {reason}")]
    Left {
        /// The rank that ended.
        rank: u32,
        /// This rank.
        waiting: u32,
        /// The operation in which this rank noticed it.
        op: String,
        /// The other rank's reason.
        reason: String,
    },
    /// Another thread of this rank has failed, and has told the other ranks.
    #[error("{op} was given up because this rank has failed: {reason}")]
    GivenUp {
        /// The operation.
        op: String,
        /// Reason of the failure.
        reason: String,
    },
    /// All ranks are alive, but some have not reached an operation.
    #[error(
        "{op} did not finish within {waited_s:.0} s: rank{} {} alive but behind: check their output, and whether a drive or a GPU hangs",
        list(ranks), if ranks.len() == 1 { "is" } else { "are" }
    )]
    Behind {
        /// The ranks behind this one.
        ranks: Vec<u32>,
        /// Seconds waited.
        waited_s: f64,
        /// The operation.
        op: String,
    },
    /// All ranks are alive and in the same operation, but the transfer takes too long.
    #[error(
        "{op} did not finish within {waited_s:.0} s although every rank takes part: the network between the ranks is too slow or blocked: check the interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) and firewalls"
    )]
    Slow {
        /// Seconds waited.
        waited_s: f64,
        /// The operation.
        op: String,
    },
    /// A value that must be equal on all ranks differs.
    #[error("{what} is not the same on all ranks: rank 0 has {expected}, rank {rank} has {found}")]
    Disagree {
        /// Name of the value.
        what: String,
        /// A rank that differs from rank 0.
        rank: u32,
        /// Rank 0's value.
        expected: String,
        /// The other rank's value.
        found: String,
    },
    /// Neither NCCL nor RCCL is available.
    #[error(
        "no NCCL or RCCL found, which several GPUs need ({}): install the one that belongs to torch and add its directory to LD_LIBRARY_PATH",
        tried.join("; ")
    )]
    NoLibrary {
        /// Each place tried, with the loader's answer.
        tried: Vec<String>,
    },
    /// The communication library failed without a dead rank.
    #[error("{op} failed: {message}")]
    Backend {
        /// The operation.
        op: String,
        /// The library's message.
        message: String,
    },
}

/// Formats ranks as " 3" or "s 1, 2 and 5".
fn list(ranks: &[u32]) -> String {
    let texts: Vec<String> = ranks.iter().map(u32::to_string).collect();
    match texts.as_slice() {
        [] => "s none".to_owned(),
        [one] => format!(" {one}"),
        [most @ .., last] => format!("s {} and {last}", most.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_listed_as_people_write_them() {
        assert_eq!(list(&[3]), " 3");
        assert_eq!(list(&[1, 2]), "s 1 and 2");
        assert_eq!(list(&[1, 2, 5]), "s 1, 2 and 5");
        let error = CollectiveError::Absent {
            ranks: vec![1, 2],
            waited_s: 60.0,
            place: "/run/meet".into(),
        };
        assert!(
            error
                .to_string()
                .contains("after 60 s ranks 1 and 2 are still missing")
        );
    }
}
