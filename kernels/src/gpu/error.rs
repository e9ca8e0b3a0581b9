//! Errors of GPU calls.

use std::fmt;

use super::Vendor;

/// Why a GPU call failed.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    /// No usable library of either vendor was found.
    #[error(
        "no GPU library: {}. Install the GPU's driver, or run without a GPU",
        JoinedLines(tried)
    )]
    NoLibrary {
        /// Each name tried, with the loader's answer.
        tried: Vec<String>,
    },
    /// A library is available, but has no such device.
    #[error("no GPU found: {message}")]
    NoDevice {
        /// The library's answer.
        message: String,
    },
    /// A call failed.
    #[error("the GPU failed in {op}: {text} (error {code})")]
    Call {
        /// The call, with sizes.
        op: String,
        /// The library's error code; CUDA and HIP agree on the common ones.
        code: i32,
        /// The library's error text.
        text: String,
    },
    /// The run-time compiler refused a source.
    #[error("the GPU's compiler refused {name} for {arch}:\n{log}")]
    Compile {
        /// Name of the source.
        name: String,
        /// Architecture of the device.
        arch: String,
        /// The compiler's log.
        log: String,
    },
    /// A vendor's device was found, but not the run-time compiler.
    #[error("no run-time compiler for {vendor} GPUs: {}", JoinedLines(tried))]
    NoCompiler {
        /// Vendor of the compiler.
        vendor: Vendor,
        /// Each name tried, with the loader's answer.
        tried: Vec<String>,
    },
}

impl GpuError {
    /// Whether the call might have succeeded with less memory.
    pub fn is_out_of_memory(&self) -> bool {
        // CUDA_ERROR_OUT_OF_MEMORY and hipErrorOutOfMemory.
        matches!(self, Self::Call { code: 2, .. })
    }

    /// Whether this machine has no usable GPU, as opposed to a failing one.
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::NoLibrary { .. } | Self::NoDevice { .. })
    }
}

struct JoinedLines<'a>(&'a [String]);

impl fmt::Display for JoinedLines<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, line) in self.0.iter().enumerate() {
            let separator = if i == 0 { "" } else { "; " };
            write!(f, "{separator}{line}")?;
        }
        Ok(())
    }
}
