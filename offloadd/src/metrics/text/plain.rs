//! The same text for scrapers of before OpenMetrics, and which of both forms a scraper asks for.
//!
//! The older form names counters in HELP and TYPE as their samples are named, with `_total`, and knows neither UNIT nor EOF;
//! the samples are the same.

use std::borrow::Cow;

/// What the older form is, for HTTP.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// An OpenMetrics text in the older form.
pub fn plain(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        if line == "# EOF" || line.starts_with("# UNIT ") {
            continue;
        }
        let types_counter = |line: &str| matches!(comment(line), Some(("TYPE", _, "counter")));
        let is_counter = match comment(line) {
            // Its TYPE follows.
            Some(("HELP", ..)) => lines.peek().is_some_and(|next| types_counter(next)),
            _ => types_counter(line),
        };
        let line = match comment(line) {
            Some((what, name, rest)) if is_counter => {
                Cow::Owned(format!("# {what} {name}_total {rest}"))
            }
            _ => Cow::Borrowed(line),
        };
        plain.push_str(&line);
        plain.push('\n');
    }
    plain
}

/// Of "# HELP name words": HELP, name, words.
fn comment(line: &str) -> Option<(&str, &str, &str)> {
    let mut parts = line.strip_prefix("# ")?.splitn(3, ' ');
    Some((parts.next()?, parts.next()?, parts.next()?))
}

/// Whether a scraper with these Accept headers would rather have the older form. Who has no preference gets OpenMetrics.
pub fn is_wanted<'a>(accept: impl Iterator<Item = &'a str>) -> bool {
    let ranges: Vec<(&str, f64)> = (accept.flat_map(|header| header.split(',')))
        .map(weighed)
        .collect();
    // The most exact range counts, whatever the others say.
    let weight = |names: [&str; 3]| {
        let of = |name: &str| {
            let named = ranges
                .iter()
                .filter(|(range, _)| range.eq_ignore_ascii_case(name));
            named.map(|(_, weight)| *weight).reduce(f64::max)
        };
        names.into_iter().find_map(of).unwrap_or(0.0)
    };
    weight(["text/plain", "text/*", "*/*"])
        > weight(["application/openmetrics-text", "application/*", "*/*"])
}

/// Of "text/plain;version=0.0.4;q=0.5": the media range and its weight, 1 where none is given or can be read.
fn weighed(range: &str) -> (&str, f64) {
    let mut parts = range.split(';').map(str::trim);
    let name = parts.next().unwrap_or_default();
    let weight = parts.find_map(|part| {
        let (key, value) = part.split_once('=')?;
        (key.trim().eq_ignore_ascii_case("q")).then_some(value.trim())
    });
    let weight = weight.and_then(|value| value.parse().ok());
    (
        name,
        weight.filter(|w| (0.0..=1.0).contains(w)).unwrap_or(1.0),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_named_as_their_samples_and_units_and_the_end_go() {
        let text = "# HELP a_bytes Bytes.\n# TYPE a_bytes counter\n# UNIT a_bytes bytes\na_bytes_total{d=\"# EOF\"} 1.0\n\
                    # HELP b A counter\n# TYPE b gauge\nb 2.0\n\
                    # HELP c_seconds Took.\n# TYPE c_seconds histogram\n# UNIT c_seconds seconds\nc_seconds_count 3\n# EOF\n";
        assert_eq!(
            plain(text),
            "# HELP a_bytes_total Bytes.\n# TYPE a_bytes_total counter\na_bytes_total{d=\"# EOF\"} 1.0\n\
             # HELP b A counter\n# TYPE b gauge\nb 2.0\n\
             # HELP c_seconds Took.\n# TYPE c_seconds histogram\nc_seconds_count 3\n"
        );
        assert_eq!(plain(""), "");
    }

    #[test]
    fn who_asks_for_the_older_form_gets_it_and_nobody_else() {
        let wanted = |headers: &[&str]| is_wanted(headers.iter().copied());
        for older in [
            "text/plain",
            "text/plain; version=0.0.4",
            "text/plain;version=0.0.4;q=1,*/*;q=0.1",
            "Text/Plain;q=0.4, application/openmetrics-text;q=0.3",
            "text/*",
            "*/*;q=0.9, application/openmetrics-text;q=0",
        ] {
            assert!(wanted(&[older]), "{older}");
        }
        for newer in [
            "",
            "*/*",
            "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            "application/openmetrics-text, text/plain",
            "text/html, application/xhtml+xml, */*;q=0.8",
            "application/openmetrics-text;q=nonsense;;=,text/plain;q=7",
            "text/plain;q=0",
            ";,;q=,,",
        ] {
            assert!(!wanted(&[newer]), "{newer}");
        }
        assert!(!wanted(&[]));
        assert!(wanted(&[
            "application/openmetrics-text;q=0.1",
            "text/plain"
        ]));
    }
}
