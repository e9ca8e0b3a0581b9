//! Who reads settings, whom they were written for, and what is said about them.

/// The program that reads a file: what its keys do depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// The native trainer.
    Trainer,
    /// The Python package.
    Package,
}

/// The program whose defaults apply to keys that a file leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WrittenFor {
    /// This one: there is no DeepSpeed file.
    Us,
    /// DeepSpeed alone.
    DeepSpeed,
    /// Hugging Face's Trainer: the file contains an "auto" that it fills in.
    Trainer,
}

/// Messages for the person who wrote the settings.
#[derive(Clone, Debug, Default)]
pub struct Remarks {
    /// Choices that may differ from what was intended.
    pub warnings: Vec<String>,
    pub notes: Vec<String>,
}
