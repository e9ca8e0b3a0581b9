//! A table in as many rows as a terminal has: its headings, of drives and jobs the busiest, and how much there is besides.

/// A table for people.
pub(super) struct Table {
    /// About the daemon.
    pub(super) head: Vec<String>,
    /// The most wanted first to be given rows.
    pub(super) parts: Vec<Part>,
    /// About what has no line.
    pub(super) foot: Vec<String>,
}

/// Lines of one kind.
pub(super) struct Part {
    /// An empty line and what stands above the columns.
    pub(super) heading: [String; 2],
    pub(super) lines: Vec<Line>,
}

/// About one drive, user or job.
pub(super) struct Line {
    pub(super) text: String,
    /// What is looked at first when not all fits: bytes a second, without end for one that someone must look at.
    pub(super) weight: f64,
}

impl Table {
    /// All of it.
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

    /// Of it what fits in `rows`, at least one; the last one then says how many drives and jobs are left out.
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
        // In turn, so that many drives leave room for jobs and the other way round.
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
        // None, when all that went was a heading with nothing under it.
        if left_out > 0 {
            shown.push(format!("and {left_out} more: offloadd top --once"));
        }
        shown
    }
}

impl Part {
    /// Nothing yet under its columns' names.
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

    /// In the order they have.
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
        // One that someone must look at comes before all.
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
