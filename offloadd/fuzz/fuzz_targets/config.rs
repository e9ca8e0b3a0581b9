//! Parses arbitrary text as the daemon's settings: it must give settings or an error message, and sizes must have the value that their text says.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use offloadd::config::Config;

fuzz_target!(|text: &str| {
    match Config::parse(text, Path::new("fuzzed.toml")) {
        Ok(config) => {
            assert!(!config.devices.is_empty(), "settings without a device");
            let _ = (config.limits(), config.descriptor_socket());
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
