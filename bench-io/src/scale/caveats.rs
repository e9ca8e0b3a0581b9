//! Warnings that follow from the rows of a scaling report.

use super::{Load, Row};
use crate::report::warnings;
use offload_support::units::ApproxRate;

/// Largest deviation of one drive alone from its limit; beyond it the instrument is wrong.
const ONE_DRIVE_SHARE: f64 = 0.02;

/// Ratio between rounds above which a median says little about a single run.
const SPREAD_MAX: f64 = 1.2;

/// All warnings, one line each.
pub(super) fn find(rows: &[Row]) -> Vec<String> {
    let mut found = off_the_limit(rows);
    found.extend(busy(rows));
    found.extend(short(rows));
    found.extend(control_scales(rows));
    found.extend(apart(rows));
    found.extend(others(rows));
    found
}

/// Warns if one drive alone misses its limit: then the limit is not what was set. Uses fio's figure if there is one.
fn off_the_limit(rows: &[Row]) -> Vec<String> {
    let alone = rows
        .iter()
        .filter(|row| row.drives == 1 && !row.unlimited && row.load != Load::Both);
    alone
        .filter_map(|row| {
            let rate = row.fio_bytes_per_s().unwrap_or_else(|| row.daemon_bytes_per_s());
            let off = rate / row.limit()? - 1.0;
            (off.abs() > ONE_DRIVE_SHARE).then(|| {
                format!(
                    "one drive alone, {}, bs {}: {:+.1} % from its limit, so the limits did not take effect",
                    row.load.word(),
                    row.bs,
                    100.0 * off
                )
            })
        })
        .collect()
}

/// Warns of rows in which the processor, and not the drives, may have been measured.
fn busy(rows: &[Row]) -> Option<String> {
    let counted = rows.iter().filter(|row| !row.unlimited);
    let busy = counted
        .clone()
        .filter(|row| warnings::is_busy(&row.daemon))
        .count();
    (busy > 0).then(|| {
        format!(
            "in {busy} of {} measurements the machine was less than {:.0} % idle: their figures may be limited by the processor",
            counted.count(),
            100.0 * warnings::IDLE_SHARE_MIN
        )
    })
}

/// Warns of measurements shorter than the slices of throttles and caches, a tenth of a second.
fn short(rows: &[Row]) -> Option<String> {
    let seconds = rows.first()?.daemon.seconds;
    (seconds < warnings::SECONDS_MIN)
        .then(|| format!("{seconds:.2} s per measurement is too short; use --runtime 3"))
}

/// Warns of other processes on the drives, and of caches between.
fn others(rows: &[Row]) -> Vec<String> {
    let interference = rows.iter().map(|row| warnings::interference(&row.daemon));
    let interference: Vec<_> = interference.collect();
    let say = |rates: Vec<f64>, what: &str| {
        let most = rates.iter().copied().fold(0.0, f64::max);
        let count = rates.iter().filter(|rate| **rate > 0.0).count();
        (count > 0).then(|| {
            let most = ApproxRate(most);
            format!(
                "in {count} of {} measurements {what}, up to {most}",
                rates.len()
            )
        })
    };
    let moved = interference
        .iter()
        .map(|one| one.others_bytes_per_s)
        .collect();
    let elsewhere = interference.iter().map(|one| one.elsewhere_bytes_per_s);
    [
        say(moved, "other processes moved bytes on these drives"),
        say(
            elsewhere.collect(),
            "a cache served bytes instead of the drives",
        ),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Warns if one synchronous thread gets more from more drives. That happens only when drives answer at memory speed and
/// only their sum is limited, as in slices of the block cgroup.
fn control_scales(rows: &[Row]) -> Option<String> {
    let of = |row: &Row| Some((row.one_thread_bytes_per_s?, row.drives as f64));
    rows.iter().find_map(|row| {
        let (rate, drives) = of(row)?;
        let one = rows.iter().find(|other| {
            other.drives == 1 && other.load == row.load && other.bs == row.bs && other.unlimited == row.unlimited
        })?;
        let times = rate / of(one)?.0;
        (drives > 1.0 && times > 0.5 * (1.0 + drives)).then(|| {
            format!(
                "one synchronous thread got {times:.1} times the rate from {drives} drives: they answer in bursts, so the figures show \
                 their sum and not how well latency is hidden"
            )
        })
    })
}

/// Reports rounds that were far apart.
fn apart(rows: &[Row]) -> Option<String> {
    let far = rows.iter().filter_map(|row| {
        let rounds = row.rounds.as_ref()?;
        let both = [Some(rounds.daemon), rounds.fio].into_iter().flatten();
        let times = both.map(|range| range.max / range.min);
        times.reduce(f64::max).filter(|times| *times > SPREAD_MAX)
    });
    let (count, most) = far.fold((0, 0.0), |(count, most), times| {
        (count + 1, f64::max(most, times))
    });
    (count > 0).then(|| {
        format!(
            "in {count} of {} rows rounds differ by up to {most:.1} times: medians are shown, with minimum and maximum",
            rows.len()
        )
    })
}
