//! Figures as people read them.

use std::fmt;

use super::Figure;

/// Formats a figure divided by the second field, with its unit and source.
pub(super) struct Of<'a>(
    pub(super) &'a Figure,
    pub(super) f64,
    pub(super) &'static str,
);

impl fmt::Display for Of<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(figure, unit, name) = self;
        write!(
            f,
            "{} {name} ({})",
            Digits(figure.value / unit),
            figure.source.word()
        )
    }
}

/// Formats a number with three significant digits.
pub(super) struct Digits(pub(super) f64);

impl fmt::Display for Digits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = self.0.abs().max(1e-9).log10().floor() as i32;
        write!(f, "{:.*}", (2 - size).clamp(0, 6) as usize, self.0)
    }
}

/// Formats a time in seconds or milliseconds.
pub(super) struct Seconds(pub(super) f64);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 < 1.0 {
            write!(f, "{} ms", Digits(self.0 * 1e3))
        } else {
            write!(f, "{} s", Digits(self.0))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_three_digits() {
        let text = |value: f64| Digits(value).to_string();
        assert_eq!(
            [
                text(305.2),
                text(26.31),
                text(5.043),
                text(0.0312),
                text(0.0)
            ],
            ["305", "26.3", "5.04", "0.0312", "0.000000"]
        );
        assert_eq!(Seconds(5.043).to_string(), "5.04 s");
        assert_eq!(Seconds(0.434).to_string(), "434 ms");
    }
}
