//! The program that started this process, torchrun, Open MPI or Slurm, by its variables, which say the process's rank.

use super::CollectiveError;
use super::slurm::{self, Step};
use super::world::{Names, RANKS_MAX, World, lossy, number};

const TORCHRUN: Names = Names {
    rank: "RANK",
    ranks: "WORLD_SIZE",
    local_rank: "LOCAL_RANK",
    local_ranks: "LOCAL_WORLD_SIZE",
    help: "start the run with `trainer launch` or torchrun, which set it, or unset RANK and WORLD_SIZE to run one process",
};

const OPEN_MPI: Names = Names {
    rank: "OMPI_COMM_WORLD_RANK",
    ranks: "OMPI_COMM_WORLD_SIZE",
    local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    local_ranks: "OMPI_COMM_WORLD_LOCAL_SIZE",
    help: "start the run with mpirun, which sets it, or with `trainer launch`",
};

/// The program whose variables describe this process. The programs that users start inside another one come first: torchrun
/// and mpirun run inside Slurm's steps.
pub(super) enum Starter {
    Torchrun,
    OpenMpi,
    Slurm(Step),
    Alone,
}

impl Starter {
    pub(super) fn from_variables(
        get: &mut dyn FnMut(&str) -> Option<String>,
    ) -> Result<Starter, CollectiveError> {
        let mut any = |names: &Names| get(names.rank).is_some() || get(names.ranks).is_some();
        if any(&TORCHRUN) {
            Ok(Starter::Torchrun)
        } else if any(&OPEN_MPI) {
            Ok(Starter::OpenMpi)
        } else {
            Ok(Step::from_variables(get)?.map_or(Starter::Alone, Starter::Slurm))
        }
    }

    /// How to get a variable that is missing from the rendezvous.
    pub(super) fn help(&self) -> &'static str {
        match self {
            Starter::OpenMpi => {
                "mpirun does not say where its processes meet; give it -x MASTER_ADDR=HOST -x MASTER_PORT=29500 with the first node as HOST"
            }
            Starter::Slurm(_) => slurm::HELP,
            Starter::Torchrun | Starter::Alone => TORCHRUN.help,
        }
    }
}

impl World {
    /// Reads `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and `LOCAL_WORLD_SIZE`, which torchrun and `trainer launch` set; without
    /// the first two the variables of Open MPI's `mpirun`, and without those the variables of Slurm's `srun`. Without
    /// any the process runs alone.
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
        match Starter::from_variables(get)? {
            Starter::Torchrun => World::numbered(&TORCHRUN, get),
            Starter::OpenMpi => World::numbered(&OPEN_MPI, get),
            Starter::Slurm(step) => Ok(step.world),
            Starter::Alone => Ok(World::ALONE),
        }
    }

    fn numbered(
        names: &Names,
        get: &mut dyn FnMut(&str) -> Option<String>,
    ) -> Result<World, CollectiveError> {
        let mut read = |name, min, max| number(name, get(name), min, max, names.help);
        let rank = read(names.rank, 0, u32::MAX)?;
        let ranks = read(names.ranks, 1, RANKS_MAX)?;
        // A node with one process needs no local rank.
        let (local_rank, local_ranks) = if ranks == 1
            && [names.local_rank, names.local_ranks]
                .iter()
                .all(|name| get(name).is_none())
        {
            (0, 1)
        } else {
            let mut read = |name, min, max| number(name, get(name), min, max, names.help);
            (
                read(names.local_rank, 0, u32::MAX)?,
                read(names.local_ranks, 1, RANKS_MAX)?,
            )
        };
        World::checked(names, rank, ranks, local_rank, local_ranks)
    }
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
    fn open_mpis_variables_say_who_this_is_unless_torchrun_started_the_process() {
        let mpi = [
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ];
        // mpirun starts its daemons with srun, so its processes inherit a step's variables.
        let slurm = [
            ("SLURM_STEP_ID", "0"),
            ("SLURM_NTASKS", "2"),
            ("SLURM_PROCID", "1"),
        ];
        let read = |variables: &[(&str, &str)], without: &str| {
            World::from_variables(&mut |name| {
                let found = variables
                    .iter()
                    .find(|(known, _)| *known == name && name != without);
                found.map(|(_, value)| (*value).to_owned())
            })
            .map_err(|error| error.to_string())
        };
        let both = [&mpi[..], &slurm].concat();
        let expected = World {
            rank: 3,
            ranks: 4,
            local_rank: 1,
            local_ranks: 2,
        };
        assert_eq!(read(&both, ""), Ok(expected));
        for (name, _) in mpi {
            let error = read(&mpi, name).unwrap_err();
            assert!(error.contains(&format!("{name} is not set")), "{error}");
            assert!(error.contains("mpirun"), "{error}");
        }
        let torchrun = [
            ("RANK", "0"),
            ("WORLD_SIZE", "2"),
            ("LOCAL_RANK", "0"),
            ("LOCAL_WORLD_SIZE", "1"),
        ];
        let all = [&torchrun[..], &mpi, &slurm].concat();
        assert_eq!(read(&all, "").unwrap().ranks, 2);
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
