//! Names of the jobs of `trainer`'s runs: what the run's directory is called, and a random number.

/// Most characters of a directory's name in a job's.
const STEM_MAX: usize = 32;

/// Part of a job's name before the number of a node.
pub const NODE: &str = "-node";

/// Digits of the random number.
const DIGITS: usize = 16;

/// What a job's name has of a directory's: letters, digits, '-' and '_', at most 32 characters; all else is '-'.
pub fn stem(dir_name: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    let stem: String = dir_name
        .chars()
        .map(|c| if plain(c) { c } else { '-' })
        .take(STEM_MAX)
        .collect();
    match stem.trim_start_matches('-') {
        "" => "run".into(),
        stem => stem.into(),
    }
}

/// The name of a run's job.
pub fn of_run(dir_name: &str, random: u64) -> String {
    format!("{}-{random:016x}", stem(dir_name))
}

/// The name of a node's part of a run, from that of the run's job.
pub fn of_node(job: &str, node: u32) -> String {
    match node {
        0 => job.into(),
        node => format!("{job}{NODE}{node}"),
    }
}

/// Whether a job, or a node's part of it, belongs to a run in a directory of this name.
pub fn is_of_run(job: &str, dir_name: &str) -> bool {
    let whole = match job.rsplit_once(NODE) {
        Some((whole, node)) if node.parse::<u32>().is_ok() => whole,
        _ => job,
    };
    let Some((own, random)) = whole.rsplit_once('-') else {
        return false;
    };
    let is_digit = |b: u8| matches!(b, b'0'..=b'9' | b'a'..=b'f');
    random.len() == DIGITS && random.bytes().all(is_digit) && own == stem(dir_name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_belong_to_the_directory_that_they_are_named_after() {
        let long = "a".repeat(40);
        for dir in ["llama", "llama.7b", "-x", "ä b", long.as_str(), "run-node2"] {
            let job = of_run(dir, 0x1dad_8fd8_bc5a_e5a4);
            assert!(
                is_of_run(&job, dir) && is_of_run(&of_node(&job, 3), dir),
                "{job}"
            );
            assert!(!is_of_run(&job, "other"), "{job}");
        }
        for job in [
            "llama",
            "llama-1dad8fd8bc5ae5ag",
            "llama-1dad",
            "old-llama-1dad8fd8bc5ae5a4",
        ] {
            assert!(!is_of_run(job, "llama"), "{job}");
        }
    }
}
