//! Repeated measurements, alternating with what they are compared with, because other load on the drives varies.

use serde::Serialize;

use crate::figures::Figures;

/// Minimum and maximum of several rounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Range {
    pub(crate) min: f64,
    pub(crate) max: f64,
}

/// Returns the round with the median rate (the lower one of an even number) and the range of all rates.
pub(crate) fn median<T>(mut rounds: Vec<T>, rate: impl Fn(&T) -> f64) -> Option<(T, Range)> {
    rounds.sort_by(|a, b| rate(a).total_cmp(&rate(b)));
    let range = Range {
        min: rate(rounds.first()?),
        max: rate(rounds.last()?),
    };
    let middle = (rounds.len() - 1) / 2;
    Some((rounds.swap_remove(middle), range))
}

/// Rate of both directions.
pub(crate) fn rate_of(figures: &Figures) -> f64 {
    figures.ways().map(|(_, way)| way.bytes_per_s).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_a_round_and_the_range_holds_all() {
        let rate = |rate: &f64| *rate;
        let range = Range { min: 1.0, max: 9.0 };
        assert_eq!(median(vec![9.0, 1.0, 2.0], rate), Some((2.0, range)));
        assert_eq!(median(vec![3.0, 9.0, 1.0, 2.0], rate), Some((2.0, range)));
        let alone = Range { min: 5.0, max: 5.0 };
        assert_eq!(median(vec![5.0], rate), Some((5.0, alone)));
        assert_eq!(median(Vec::new(), rate), None);
    }
}
