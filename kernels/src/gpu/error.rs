//! What can go wrong between a GPU and us.

use std::fmt;

use super::Vendor;

/// Why a GPU could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    /// No usable library of either vendor was found.
    #[error(
        "no GPU library: {}. Install the GPU's driver, or run without a GPU",
        Listed(tried)
    )]
    NoLibrary {
        /// Each name that was looked for, with the loader's answer.
        tried: Vec<String>,
    },
    /// A library answered, but it has no such device.
    #[error("no GPU found: {message}")]
    NoDevice {
        /// Which library said so.
        message: String,
    },
    /// A call failed.
    #[error("the GPU failed in {op}: {text} (error {code})")]
    Call {
        /// What was tried, with sizes.
        op: String,
        /// The library's number; CUDA and HIP agree on the common ones.
        code: i32,
        /// The library's words.
        text: String,
    },
    /// The run-time compiler refused a source.
    #[error("the GPU's compiler refused {name} for {arch}:\n{log}")]
    Compile {
        /// Which source.
        name: String,
        /// For which device.
        arch: String,
        /// The compiler's own words.
        log: String,
    },
    /// A device of one vendor was found, but not its run-time compiler.
    #[error("no run-time compiler for {vendor} GPUs: {}", Listed(tried))]
    NoCompiler {
        /// Whose compiler.
        vendor: Vendor,
        /// Each name that was looked for, with the loader's answer.
        tried: Vec<String>,
    },
}

impl GpuError {
    /// Whether less memory asked for might have worked.
    pub fn is_out_of_memory(&self) -> bool {
        // CUDA_ERROR_OUT_OF_MEMORY and hipErrorOutOfMemory.
        matches!(self, Self::Call { code: 2, .. })
    }

    /// Whether this machine has no GPU for us, as opposed to one that fails.
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::NoLibrary { .. } | Self::NoDevice { .. })
    }
}

struct Listed<'a>(&'a [String]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, line) in self.0.iter().enumerate() {
            let separator = if i == 0 { "" } else { "; " };
            write!(f, "{separator}{line}")?;
        }
        Ok(())
    }
}
