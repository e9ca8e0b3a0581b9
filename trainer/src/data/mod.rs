//! Text into windows of tokens, in an order that any language can repeat.
//!
//! ```text
//!   files ──▶ bytes, one after another ──▶ [ training part                         | held-out tail ]
//!                                            W = (bytes - 1) / seq_len windows, window w = bytes w*seq_len ..= w*seq_len + seq_len
//!                                            (seq_len inputs, and as targets the same shifted by one)
//! ```
//!
//! A byte is a token. Sample i (from 0, over the whole run) is window `order::permuted(seed, i / W, W, i % W)`.
//! Nothing here has state: the next sample's number is all that a resumed run needs.

pub mod order;
mod text;

use crate::config::DataSettings;
use crate::fingerprint::Fingerprint;

pub use text::DataError;

/// Token ids a byte can have.
pub const VOCAB_SIZE: u64 = 256;

/// The text of a run in memory.
pub struct Data {
    bytes: Vec<u8>,
    /// Bytes before the held-out tail.
    train_bytes: usize,
    seq_len: usize,
    seed: u64,
    files: usize,
}

/// Windows of one micro-batch, row by row: `rows * seq_len` inputs and as many targets.
pub struct Windows {
    pub inputs: Vec<i64>,
    pub targets: Vec<i64>,
}

impl Data {
    /// Reads the text.
    ///
    /// # Errors
    /// A file that is missing or empty; a text too short for one window, or a held-out tail too short for one.
    pub fn open(
        settings: &DataSettings,
        seq_len: usize,
        seed: u64,
        evaluates: bool,
    ) -> Result<Self, DataError> {
        let text::Text { bytes, files } = text::read(&settings.files)?;
        let holdout_bytes = (bytes.len() as f64 * settings.holdout_share.get()) as usize;
        let train_bytes = bytes.len() - holdout_bytes;
        let too_short = |part, bytes: usize| DataError::TooShort {
            part,
            bytes,
            needed: seq_len + 1,
            seq_len,
        };
        if train_bytes <= seq_len {
            return Err(too_short("text for training", train_bytes));
        }
        if evaluates && holdout_bytes <= seq_len {
            return Err(too_short("held-out text", holdout_bytes));
        }
        Ok(Self {
            bytes,
            train_bytes,
            seq_len,
            seed,
            files,
        })
    }

    /// Bytes of all files together.
    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Files that were read.
    pub fn files(&self) -> usize {
        self.files
    }

    /// A fingerprint of the text, to tell that it changed between two starts.
    pub fn fingerprint(&self) -> u64 {
        Fingerprint::of(&self.bytes)
    }

    /// Windows of the training part.
    pub fn windows(&self) -> u64 {
        ((self.train_bytes - 1) / self.seq_len) as u64
    }

    /// Windows of the held-out tail.
    pub fn holdout_windows(&self) -> u64 {
        ((self.bytes.len() - self.train_bytes).saturating_sub(1) / self.seq_len) as u64
    }

    /// `rows` samples from sample number `first` on.
    pub fn samples(&self, first: u64, rows: usize) -> Windows {
        let windows = self.windows();
        self.collect((first..first + rows as u64).map(|sample| {
            let window = order::permuted(self.seed, sample / windows, windows, sample % windows);
            window as usize * self.seq_len
        }))
    }

    /// `rows` windows of the held-out tail from window `first` on, starting over at its end.
    pub fn holdout(&self, first: u64, rows: usize) -> Windows {
        let windows = self.holdout_windows();
        assert!(windows > 0, "checked when the text was read");
        self.collect(
            (first..first + rows as u64)
                .map(|w| self.train_bytes + (w % windows) as usize * self.seq_len),
        )
    }

    fn collect(&self, starts: impl Iterator<Item = usize>) -> Windows {
        let mut windows = Windows {
            inputs: Vec::new(),
            targets: Vec::new(),
        };
        for start in starts {
            let bytes = &self.bytes[start..=start + self.seq_len];
            windows
                .inputs
                .extend(bytes[..self.seq_len].iter().map(|byte| i64::from(*byte)));
            windows
                .targets
                .extend(bytes[1..].iter().map(|byte| i64::from(*byte)));
        }
        windows
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Share;

    fn data(bytes: usize, seq_len: usize, share: f64) -> Result<Data, DataError> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("text");
        std::fs::write(
            &path,
            (0..bytes).map(|i| (i % 251) as u8).collect::<Vec<_>>(),
        )
        .expect("written");
        let settings = DataSettings {
            files: vec![path],
            holdout_share: Share::new(share).expect("a share"),
        };
        Data::open(&settings, seq_len, 7, share > 0.0)
    }

    #[test]
    fn targets_are_inputs_shifted_by_one() {
        let windows = data(100, 9, 0.0).unwrap().samples(3, 4);
        assert_eq!(windows.inputs.len(), 4 * 9);
        for row in 0..4 {
            assert_eq!(
                windows.inputs[row * 9 + 1..row * 9 + 9],
                windows.targets[row * 9..row * 9 + 8]
            );
        }
    }

    #[test]
    fn an_epoch_has_every_window_once_and_the_next_one_another_order() {
        let data = data(1000, 9, 0.0).unwrap();
        let windows = data.windows();
        assert_eq!(windows, 111);
        let starts = |first: u64| -> Vec<i64> {
            (0..windows)
                .map(|i| data.samples(first + i, 1).inputs[0])
                .collect()
        };
        let (mut one, mut two) = (starts(0), starts(windows));
        assert_ne!(one, two);
        one.sort_unstable();
        two.sort_unstable();
        assert_eq!(one, two);
        one.dedup();
        assert_eq!(
            one.len() as u64,
            windows,
            "each window starts with a byte of its own here"
        );
    }

    #[test]
    fn held_out_text_is_never_trained_on() {
        let data = data(240, 9, 0.25).unwrap();
        assert_eq!((data.windows(), data.holdout_windows()), (19, 6));
        let trained = (0..data.windows())
            .flat_map(|i| data.samples(i, 1).targets)
            .max();
        let held = (0..data.holdout_windows())
            .flat_map(|w| data.holdout(w, 1).inputs)
            .min();
        assert!(trained < held);
        assert_eq!(data.holdout(6, 1).inputs, data.holdout(0, 1).inputs);
    }

    #[test]
    fn a_text_shorter_than_a_window_is_refused() {
        assert!(matches!(
            data(9, 9, 0.0),
            Err(DataError::TooShort {
                bytes: 9,
                needed: 10,
                ..
            })
        ));
        assert!(data(10, 9, 0.0).is_ok());
        assert!(matches!(
            data(40, 9, 0.2),
            Err(DataError::TooShort {
                part: "held-out text",
                bytes: 8,
                ..
            })
        ));
    }
}
