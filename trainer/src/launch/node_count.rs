//! The number of nodes of a run, as `--nnodes` gives it.

/// Least and largest number of nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeCount {
    /// The run does not start with fewer nodes.
    pub min: u32,
    /// Node numbers are below this.
    pub max: u32,
}

impl std::str::FromStr for NodeCount {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<NodeCount, Self::Err> {
        let number = |text: &str| {
            let digits = text.bytes().all(|byte| byte.is_ascii_digit());
            text.parse()
                .ok()
                .filter(|count| digits && (1..=super::hostfile::HOSTS_MAX as u32).contains(count))
        };
        let (min, max) = text.split_once(':').unwrap_or((text, text));
        match (number(min), number(max)) {
            (Some(min), Some(max)) if min <= max => Ok(NodeCount { min, max }),
            _ => Err(
                "expected a number of nodes from 1 to 1024, or the least and the largest as in 2:4",
            ),
        }
    }
}

impl std::fmt::Display for NodeCount {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.min == self.max {
            write!(f, "{}", self.min)
        } else {
            write!(f, "{}:{}", self.min, self.max)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_nodes_are_parsed() {
        assert_eq!("2".parse(), Ok(NodeCount { min: 2, max: 2 }));
        assert_eq!("1:1024".parse(), Ok(NodeCount { min: 1, max: 1024 }));
        for text in [
            "", "0", "0:2", "2:1", "1:", ":2", "x", "+1", "1:2:3", "1025", "-1",
        ] {
            assert!(text.parse::<NodeCount>().is_err(), "{text}");
        }
        for text in ["3", "1:2"] {
            assert_eq!(text.parse::<NodeCount>().unwrap().to_string(), text);
        }
    }
}
