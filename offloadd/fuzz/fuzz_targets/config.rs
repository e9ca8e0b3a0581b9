//! Any text as the daemon's settings: settings or a refusal in words, and sizes that are what they say.

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
