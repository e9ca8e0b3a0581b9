//! Slurm's variables: which task of a step this process is, and on which node the tasks meet.
//!
//! A step's own variables (`SLURM_STEP_*`) precede those of its job. A process in an allocation that `srun` did not
//! start (a batch script, an interactive shell) has no `SLURM_STEP_ID` or is the only task, and is alone.

use super::CollectiveError;
use super::world::{Names, RANKS_MAX, World, number};

/// How to get the variables that a message names.
pub(super) const HELP: &str = "start the run with `srun`, which sets it, or with `trainer launch`";

/// Lowest port that is derived from a job's number. The ports above are not used for outgoing connections.
const PORT_MIN: u64 = 10_000;

/// Number of ports that are derived.
const PORTS: u64 = 20_000;

const NAMES: Names = Names {
    rank: "SLURM_PROCID",
    ranks: "SLURM_NTASKS",
    local_rank: "SLURM_LOCALID",
    local_ranks: "SLURM_TASKS_PER_NODE",
    help: HELP,
};

/// Function that returns the value of a variable.
type Get<'a> = dyn FnMut(&str) -> Option<String> + 'a;

/// Place of this process in a step of several tasks.
#[derive(Debug, PartialEq)]
pub(super) struct Step {
    pub(super) world: World,
    /// The step's first node.
    pub(super) first_node: String,
    /// TCP port that all tasks derive from the numbers of job and step.
    pub(super) port: u16,
    /// Name of this start of the step: job, step and restarts.
    pub(super) run: String,
}

impl Step {
    /// Returns `None` if `srun` did not start this process as one of several tasks.
    ///
    /// # Errors
    /// A variable is missing, cannot be parsed, or contradicts another one.
    pub(super) fn from_variables(get: &mut Get) -> Result<Option<Step>, CollectiveError> {
        let Some(step) = get("SLURM_STEP_ID") else {
            return Ok(None);
        };
        let (ranks_name, ranks) = either(get, ["SLURM_STEP_NUM_TASKS", NAMES.ranks]);
        let ranks = number(ranks_name, ranks, 1, RANKS_MAX, HELP)?;
        if ranks == 1 {
            return Ok(None);
        }
        let names = Names {
            ranks: ranks_name,
            ..NAMES
        };
        let rank = number(names.rank, get(names.rank), 0, u32::MAX, HELP)?;
        let local_rank = number(names.local_rank, get(names.local_rank), 0, u32::MAX, HELP)?;
        let nodes = Nodes::from_variables(get)?;
        nodes.check_tasks(ranks, ranks_name)?;
        let node = nodes.own(get)?;
        let local_ranks = nodes.tasks[node.unwrap_or(0)];
        let world = World::checked(&names, rank, ranks, local_rank, local_ranks)?;
        if let Some(node) = node {
            let before: u32 = nodes.tasks[..node].iter().sum();
            if before + local_rank != rank {
                return Err(CollectiveError::Environment {
                    name: names.rank,
                    value: rank.to_string(),
                    problem: format!(
                        "is task {local_rank} of node {node}, so tasks are not numbered node after node: add --distribution=block to srun"
                    ),
                });
            }
        }
        let job = id("SLURM_JOB_ID", get("SLURM_JOB_ID"))?;
        let step = id("SLURM_STEP_ID", Some(step))?;
        let restarts = get("SLURM_RESTART_COUNT").unwrap_or_default();
        Ok(Some(Step {
            world,
            first_node: nodes.first,
            // Steps of one job that run at the same time have different ports.
            port: (PORT_MIN + (job.wrapping_mul(31).wrapping_add(step)) % PORTS) as u16,
            run: format!("slurm-{job}.{step}.{restarts}"),
        }))
    }
}

/// Nodes of a step and the number of tasks on each.
struct Nodes {
    first: String,
    count: usize,
    list_name: &'static str,
    list: String,
    tasks: Vec<u32>,
    tasks_name: &'static str,
    tasks_text: String,
}

impl Nodes {
    fn from_variables(get: &mut Get) -> Result<Nodes, CollectiveError> {
        let (list_name, list) = either(get, ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"]);
        let list = list.ok_or(missing(list_name))?;
        let names = node_names(&list).ok_or_else(|| CollectiveError::Environment {
            name: list_name,
            value: list.clone(),
            problem: "is no list of nodes such as n[001-003,7],gpu1".to_owned(),
        })?;
        let (tasks_name, text) = either(get, ["SLURM_STEP_TASKS_PER_NODE", NAMES.local_ranks]);
        let text = text.ok_or(missing(tasks_name))?;
        let tasks = tasks_per_node(&text).ok_or_else(|| CollectiveError::Environment {
            name: tasks_name,
            value: text.clone(),
            problem: "is no list of numbers of tasks such as 2(x3),1".to_owned(),
        })?;
        Ok(Nodes {
            count: names.len(),
            first: names.into_iter().next().expect("a list has a node"),
            list_name,
            list,
            tasks,
            tasks_name,
            tasks_text: text,
        })
    }

    /// Checks that nodes, tasks per node and the number of tasks agree.
    fn check_tasks(&self, ranks: u32, ranks_name: &str) -> Result<(), CollectiveError> {
        if self.count != self.tasks.len() {
            return Err(CollectiveError::Environment {
                name: self.tasks_name,
                value: self.tasks_text.clone(),
                problem: format!(
                    "is for {} nodes, but {}={:?} names {}",
                    self.tasks.len(),
                    self.list_name,
                    self.list,
                    self.count
                ),
            });
        }
        let sum: u64 = self.tasks.iter().map(|&tasks| u64::from(tasks)).sum();
        if sum != u64::from(ranks) {
            return Err(CollectiveError::Environment {
                name: self.tasks_name,
                value: self.tasks_text.clone(),
                problem: format!("is {sum} tasks, but {ranks_name} is {ranks}"),
            });
        }
        Ok(())
    }

    /// Index of this process's node. `None` if it is not told and every node has the same number of tasks.
    fn own(&self, get: &mut Get) -> Result<Option<usize>, CollectiveError> {
        const NAME: &str = "SLURM_NODEID";
        let Some(value) = get(NAME) else {
            let equal = self.tasks.iter().all(|&tasks| tasks == self.tasks[0]);
            return if equal { Ok(None) } else { Err(missing(NAME)) };
        };
        let node = number(NAME, Some(value), 0, self.count as u32 - 1, HELP)?;
        Ok(Some(node as usize))
    }
}

fn missing(name: &'static str) -> CollectiveError {
    CollectiveError::Missing { name, help: HELP }
}

/// The first of two variables that is set, or the name of the second.
fn either(get: &mut Get, names: [&'static str; 2]) -> (&'static str, Option<String>) {
    let [step, job] = names;
    match get(step) {
        Some(value) => (step, Some(value)),
        None => (job, get(job)),
    }
}

fn id(name: &'static str, value: Option<String>) -> Result<u64, CollectiveError> {
    let value = value.ok_or(missing(name))?;
    digits(&value).ok_or_else(|| CollectiveError::Environment {
        name,
        value,
        problem: "is not a number".to_owned(),
    })
}

/// Parses digits only: `parse` also accepts a sign.
fn digits(text: &str) -> Option<u64> {
    let all_digits = text.bytes().all(|byte| byte.is_ascii_digit());
    all_digits.then(|| text.parse().ok())?
}

/// Parses numbers of tasks such as `2(x3),1`: three nodes with two tasks and one with one.
fn tasks_per_node(text: &str) -> Option<Vec<u32>> {
    let mut tasks = Vec::new();
    for part in text.split(',') {
        let (count, times) = match part.split_once("(x") {
            None => (part, 1),
            Some((count, times)) => (count, digits(times.strip_suffix(')')?)?),
        };
        let count = digits(count)?;
        let bounds = 1..=u64::from(RANKS_MAX);
        if !bounds.contains(&count) || !bounds.contains(&(times + tasks.len() as u64)) || times == 0
        {
            return None;
        }
        tasks.extend((0..times).map(|_| count as u32));
    }
    Some(tasks)
}

/// Expands a list of nodes such as `n[001-003,7],gpu-a[1-2]b` into their names.
fn node_names(list: &str) -> Option<Vec<String>> {
    let mut names = Vec::new();
    for part in split_outside_brackets(list)? {
        let mut expanded = vec![String::new()];
        let mut rest = part;
        while !rest.is_empty() {
            let (plain, brackets) = rest
                .split_once('[')
                .map_or((rest, None), |(a, b)| (a, Some(b)));
            if !plain
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
            {
                return None;
            }
            expanded.iter_mut().for_each(|name| name.push_str(plain));
            let Some(brackets) = brackets else { break };
            let (ranges, after) = brackets.split_once(']')?;
            let numbers = numbers_of(ranges)?;
            if expanded.len() * numbers.len() > RANKS_MAX as usize {
                return None;
            }
            let each = |name: &String| {
                let joined = numbers.iter().map(move |number| format!("{name}{number}"));
                joined.collect::<Vec<_>>()
            };
            expanded = expanded.iter().flat_map(each).collect();
            rest = after;
        }
        names.extend(expanded);
        let usable = |name: &String| !name.is_empty() && name.len() <= 253;
        if names.len() > RANKS_MAX as usize || !names.iter().all(usable) {
            return None;
        }
    }
    Some(names)
}

/// Splits at commas that are not inside brackets. `None` if brackets do not match.
fn split_outside_brackets(list: &str) -> Option<Vec<&str>> {
    let (mut parts, mut start, mut inside) = (Vec::new(), 0, false);
    for (at, byte) in list.bytes().enumerate() {
        match byte {
            b'[' | b']' if inside == (byte == b'[') => return None,
            b'[' | b']' => inside = !inside,
            b',' if !inside => {
                parts.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&list[start..]);
    (!inside).then_some(parts)
}

/// Expands `001-003,7` into `001`, `002`, `003` and `7`: numbers have as many digits as the first of their range.
fn numbers_of(ranges: &str) -> Option<Vec<String>> {
    let mut numbers = Vec::new();
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let width = first.len();
        if width == 0 || width > 18 || last.is_empty() {
            return None;
        }
        let (first, last) = (digits(first)?, digits(last)?);
        if first > last || last - first >= u64::from(RANKS_MAX) {
            return None;
        }
        numbers.extend((first..=last).map(|number| format!("{number:0width$}")));
    }
    (numbers.len() <= RANKS_MAX as usize).then_some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The variables of task 5 of 7 on four nodes, with some changed (`None`: removed).
    fn step(changes: &[(&str, Option<&str>)]) -> Result<Option<Step>, String> {
        let variables = [
            ("SLURM_STEP_ID", "0"),
            ("SLURM_JOB_ID", "4711"),
            ("SLURM_PROCID", "5"),
            ("SLURM_NTASKS", "7"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_NODEID", "2"),
            ("SLURM_TASKS_PER_NODE", "2(x3),1"),
            ("SLURM_STEP_NODELIST", "n[001-003],gpu-a"),
        ];
        Step::from_variables(&mut |name| {
            let changed = changes.iter().find(|(known, _)| *known == name);
            let set = variables.iter().find(|(known, _)| *known == name);
            match changed {
                Some((_, value)) => value.map(str::to_owned),
                None => set.map(|(_, value)| (*value).to_owned()),
            }
        })
        .map_err(|error| error.to_string())
    }

    #[test]
    fn srun_says_who_this_is_and_where_tasks_meet() {
        let found = step(&[]).unwrap().unwrap();
        let world = World {
            rank: 5,
            ranks: 7,
            local_rank: 1,
            local_ranks: 2,
        };
        assert_eq!(found.world, world);
        assert_eq!(found.first_node, "n001");
        let other = step(&[("SLURM_STEP_ID", Some("1"))]).unwrap().unwrap();
        assert_ne!(
            found.port, other.port,
            "steps of one job have their own ports"
        );
        assert_ne!(found.run, other.run);
        let last = step(&[
            ("SLURM_PROCID", Some("6")),
            ("SLURM_LOCALID", Some("0")),
            ("SLURM_NODEID", Some("3")),
        ]);
        assert_eq!(last.unwrap().unwrap().world.local_ranks, 1);
    }

    #[test]
    fn the_steps_variables_precede_those_of_its_job() {
        let found = step(&[
            ("SLURM_NTASKS", Some("64")),
            ("SLURM_STEP_NUM_TASKS", Some("7")),
            ("SLURM_TASKS_PER_NODE", Some("16(x4)")),
            ("SLURM_STEP_TASKS_PER_NODE", Some("2(x3),1")),
            ("SLURM_JOB_NODELIST", Some("other[1-4]")),
        ]);
        let found = found.unwrap().unwrap();
        assert_eq!((found.world.ranks, found.first_node.as_str()), (7, "n001"));
        let job = [
            ("SLURM_STEP_NODELIST", None),
            ("SLURM_JOB_NODELIST", Some("other[1-4]")),
        ];
        assert_eq!(step(&job).unwrap().unwrap().first_node, "other1");
    }

    #[test]
    fn a_process_that_srun_did_not_start_or_that_is_the_only_task_is_alone() {
        assert_eq!(step(&[("SLURM_STEP_ID", None)]).unwrap(), None);
        assert_eq!(step(&[("SLURM_NTASKS", Some("1"))]).unwrap(), None);
        let shell = [("SLURM_STEP_NUM_TASKS", Some("1"))];
        assert_eq!(step(&shell).unwrap(), None, "a shell in an allocation");
    }

    #[test]
    fn a_variable_that_is_missing_is_named() {
        for name in [
            "SLURM_JOB_ID",
            "SLURM_PROCID",
            "SLURM_NTASKS",
            "SLURM_LOCALID",
            "SLURM_NODEID",
            "SLURM_TASKS_PER_NODE",
        ] {
            let error = step(&[(name, None)]).unwrap_err();
            assert!(error.contains(&format!("{name} is not set")), "{error}");
        }
        let error = step(&[("SLURM_STEP_NODELIST", None)]).unwrap_err();
        assert!(error.contains("SLURM_JOB_NODELIST is not set"), "{error}");
        // Without the node's number, equal nodes are known.
        let equal = step(&[
            ("SLURM_NODEID", None),
            ("SLURM_NTASKS", Some("8")),
            ("SLURM_TASKS_PER_NODE", Some("2(x4)")),
        ]);
        assert_eq!(equal.unwrap().unwrap().world.local_ranks, 2);
    }

    #[test]
    fn values_that_contradict_each_other_are_refused() {
        for (name, value, says) in [
            ("SLURM_PROCID", "7", "not below SLURM_NTASKS, 7"),
            ("SLURM_PROCID", "x", "SLURM_PROCID=\"x\" is not a number"),
            ("SLURM_LOCALID", "2", "not below SLURM_TASKS_PER_NODE, 2"),
            ("SLURM_LOCALID", "0", "add --distribution=block to srun"),
            ("SLURM_NTASKS", "8", "is 7 tasks, but SLURM_NTASKS is 8"),
            ("SLURM_NODEID", "4", "is not a number from 0 to 3"),
            (
                "SLURM_STEP_NODELIST",
                "n[1-3]",
                "is for 4 nodes, but SLURM_STEP_NODELIST=\"n[1-3]\" names 3",
            ),
            ("SLURM_STEP_NODELIST", "n[1-", "is no list of nodes"),
            (
                "SLURM_TASKS_PER_NODE",
                "2(y3)",
                "is no list of numbers of tasks",
            ),
            (
                "SLURM_JOB_ID",
                "12_3",
                "SLURM_JOB_ID=\"12_3\" is not a number",
            ),
        ] {
            let error = step(&[(name, Some(value))]).unwrap_err();
            assert!(error.contains(says), "{name}={value}: {error}");
        }
    }

    #[test]
    fn lists_of_nodes_are_expanded_as_slurm_writes_them() {
        let names = |list: &str| node_names(list).map(|names| names.join(" "));
        for (list, expected) in [
            ("n1", "n1"),
            ("n1,n2", "n1 n2"),
            (
                "n[001-003,7],gpu-a[1-2]b",
                "n001 n002 n003 n7 gpu-a1b gpu-a2b",
            ),
            ("n[8-11]", "n8 n9 n10 n11"),
            (
                "r[1-2]n[3,5].site",
                "r1n3.site r1n5.site r2n3.site r2n5.site",
            ),
            ("[1-2]", "1 2"),
        ] {
            assert_eq!(names(list).as_deref(), Some(expected), "{list}");
        }
        for list in [
            "",
            ",",
            "n1,",
            "n[",
            "n]",
            "n[]",
            "n[1",
            "n[1-]",
            "n[-2]",
            "n[2-1]",
            "n[1,,2]",
            "n[[1]]",
            "n[1]]",
            "n[a-b]",
            "n 1",
            "n[+1]",
            "n[1-99999]",
            "n[1-99999999999999999999]",
            "a[1-999]b[1-999]",
            "-\n",
            "n[1-3-5]",
        ] {
            assert_eq!(names(list), None, "{list:?}");
        }
    }

    #[test]
    fn numbers_of_tasks_are_expanded() {
        assert_eq!(tasks_per_node("2(x3),1"), Some(vec![2, 2, 2, 1]));
        assert_eq!(tasks_per_node("4"), Some(vec![4]));
        for text in [
            "",
            "0",
            "x",
            "2(x0)",
            "2(x)",
            "2(x3",
            "2x3",
            "2,",
            "-1",
            "2(x99999999)",
            "9999999",
            "2 (x3)",
        ] {
            assert_eq!(tasks_per_node(text), None, "{text:?}");
        }
    }
}
