//! `offloadd serve`: prepares the process, and runs the daemon in it.

use std::path::Path;

use anyhow::{Context, Result};
use offloadd::daemon;
use offloadd::handover::inherited::{self, InheritedDescriptors};

use super::log;
use super::{follow_parent, raise_descriptor_limit};

pub(crate) fn run(config: &Path, private: bool) -> Result<()> {
    let given = match private {
        true => {
            inherited::close_all()
                .context("closing descriptors inherited from the parent process")?;
            InheritedDescriptors::new()
        }
        false => inherited::take_descriptors(),
    };
    let parent = private.then(follow_parent).transpose()?.flatten();
    let _last_lines = log::to_stderr();
    abort_on_panic();
    raise_descriptor_limit();
    daemon::run(config, private, parent, given)
}

/// Makes a panic in any thread end the daemon: with a thread missing, processes would wait for ever.
fn abort_on_panic() {
    let tell = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        tell(panic);
        std::process::abort();
    }));
}
