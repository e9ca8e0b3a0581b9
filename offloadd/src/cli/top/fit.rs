//! Cuts a table down to the rows of a terminal: keeps the headings and the busiest drives and jobs, and counts the rest.

pub(super) struct Table {
    /// Lines about the daemon.
    pub(super) head: Vec<String>,
    /// In order of preference when rows are short.
    pub(super) parts: Vec<Part>,
    /// Lines about what is not in the table.
    pub(super) foot: Vec<String>,
}

pub(super) struct Part {
    /// An empty line and the names of the columns.
    pub(super) heading: [String; 2],
    pub(super) lines: Vec<Line>,
}

/// One drive, user or job.
pub(super) struct Line {
    pub(super) text: String,
    /// Lines with a larger weight are kept first: bytes per second, or infinity for a line that needs attention.
    pub(super) weight: f64,
}

impl Table {
    pub(super) fn whole(self) -> Vec<String> {
        let parts = self.parts.into_iter().flat_map(|part| {
            let lines = part.lines.into_iter().map(|line| line.text);
            part.heading.into_iter().chain(lines)
        });
        (self.head.into_iter())
            .chain(parts)
            .chain(self.foot)
            .collect()
    }

    fn line_count(&self) -> usize {
        let parts = self.parts.iter().map(|p| p.heading.len() + p.lines.len());
        self.head.len() + parts.sum::<usize>() + self.foot.len()
    }

    /// Returns at most `rows` lines, at least one. If lines are left out, the last one says how many.
    pub(super) fn fitting(mut self, rows: usize) -> Vec<String> {
        if self.line_count() <= rows {
            return self.whole();
        }
        let entries: usize = self.parts.iter().map(|part| part.lines.len()).sum();
        let entry_count = entries + self.foot.len();
        let rows = rows.max(1) - 1;
        self.parts.retain(|part| !part.lines.is_empty());
        let headings: usize = self.parts.iter().map(|part| part.heading.len()).sum();
        let mut free = rows.saturating_sub(self.head.len() + headings);
        // Parts take rows in turn, so that many drives leave rows for jobs, and many jobs for drives.
        let mut counts = vec![0; self.parts.len()];
        while free > 0 {
            let before = free;
            for (part, count) in self.parts.iter().zip(&mut counts) {
                if *count < part.lines.len() && free > 0 {
                    *count += 1;
                    free -= 1;
                }
            }
            if free == before {
                break;
            }
        }
        let shown_count: usize = counts.iter().sum();
        for (part, count) in self.parts.iter_mut().zip(counts) {
            part.keep_weightiest(count);
        }
        self.foot.truncate(free);
        let left_out = entry_count - shown_count - self.foot.len();
        let mut shown = self.whole();
        shown.truncate(rows);
        // Zero if only a heading without lines was removed.
        if left_out > 0 {
            shown.push(format!("and {left_out} more: offloadd top --once"));
        }
        shown
    }
}

impl Part {
    pub(super) fn under(columns: String) -> Self {
        Self {
            heading: [String::new(), columns],
            lines: Vec::new(),
        }
    }

    pub(super) fn push(&mut self, text: &str, weight: f64) {
        self.lines.push(Line {
            text: text.trim_end().to_owned(),
            weight,
        });
    }

    /// Keeps the order.
    fn keep_weightiest(&mut self, count: usize) {
        let mut order: Vec<usize> = (0..self.lines.len()).collect();
        order.sort_by(|a, b| self.lines[*b].weight.total_cmp(&self.lines[*a].weight));
        order.truncate(count);
        let mut index = 0..;
        (self.lines).retain(|_| index.next().is_some_and(|index| order.contains(&index)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three drives, of which the last is the busiest, no user, and forty jobs.
    fn table() -> Table {
        let part = |name: &str, count: usize| Part {
            heading: [String::new(), name.into()],
            lines: (0..count)
                .map(|index| Line {
                    text: format!("{name}{index}"),
                    weight: index as f64,
                })
                .collect(),
        };
        Table {
            head: vec!["up".into()],
            parts: vec![part("drive", 3), part("job", 40)],
            foot: vec!["idle".into()],
        }
    }

    #[test]
    fn the_busiest_are_shown_in_their_order_and_the_others_counted() {
        let shown = table().fitting(12);
        let expected = [
            "up",
            "",
            "drive",
            "drive0",
            "drive1",
            "drive2",
            "",
            "job",
            "job37",
            "job38",
            "job39",
            "and 38 more: offloadd top --once",
        ];
        assert_eq!(shown, expected);
        // A line that needs attention comes before all others.
        let mut sick = table();
        sick.parts[1].lines[5].weight = f64::INFINITY;
        assert_eq!(sick.fitting(12)[8..11], ["job5", "job38", "job39"]);
    }

    #[test]
    fn no_size_shows_more_than_fits_or_counts_wrongly() {
        let whole = table().whole();
        assert_eq!(whole.len(), 1 + 2 + 3 + 2 + 40 + 1);
        for rows in 0..60 {
            let shown = table().fitting(rows);
            assert!(shown.len() <= rows.max(1), "{rows}: {shown:?}");
            if rows >= whole.len() {
                assert_eq!(shown, whole);
                continue;
            }
            let is_entry = |line: &&String| line.ends_with(|c: char| c.is_ascii_digit());
            let left_out = 3 + 40 + 1 - shown.iter().filter(is_entry).count();
            let last = shown.last().unwrap();
            assert!(
                last.starts_with(&format!("and {left_out} more: ")),
                "{rows}: {last}"
            );
            assert_eq!(shown.len(), rows.max(1));
        }
    }
}
