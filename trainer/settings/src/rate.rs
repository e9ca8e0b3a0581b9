//! A learning rate as people write it.

use std::fmt;

/// Learning rate in the usual notation, as 5e-5 or 0. Six digits after the point hide the error of a number
/// that was an `f32` once, or of a product.
pub struct Rate(pub f64);

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0.0 => f.write_str("0"),
            rate => {
                let text = format!("{rate:.6e}");
                let (digits, power) = text.split_once('e').expect("an exponent");
                let digits = digits.trim_end_matches('0').trim_end_matches('.');
                write!(f, "{digits}e{power}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_shown_without_rounding_errors() {
        let text = |rate: f64| Rate(rate).to_string();
        assert_eq!(
            [
                text(f64::from(1e-5_f32)),
                text(1e-5 * 1e-4),
                text(2.5e-4),
                text(0.5),
                text(20.0),
                text(0.0)
            ],
            ["1e-5", "1e-9", "2.5e-4", "5e-1", "2e1", "0"]
        );
    }
}
