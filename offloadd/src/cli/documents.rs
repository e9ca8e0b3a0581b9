//! Manual pages and shell completions, generated from the definition of the command line.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;

/// Section of the manual for system administration.
const SECTION: &str = "8";

pub(crate) fn completions(shell: Shell, mut command: Command) -> Result<()> {
    let mut text = Vec::new();
    let name = command.get_name().to_owned();
    clap_complete::generate(shell, &mut command, name, &mut text);
    // A reader that closes the pipe early is not an error.
    match std::io::stdout().write_all(&text) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("printing the completions"),
    }
}

/// Writes one page for the program and one for each command and subcommand.
pub(crate) fn man(dir: &Path, command: Command) -> Result<()> {
    std::fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let name = command.get_name().to_owned();
    pages(dir, &name, &command)
}

fn pages(dir: &Path, name: &str, command: &Command) -> Result<()> {
    let path = dir.join(format!("{name}.{SECTION}"));
    page(name, command.clone())
        .and_then(|text| std::fs::write(&path, text))
        .with_context(|| format!("writing {}", path.display()))?;
    (command.get_subcommands())
        .try_for_each(|one| pages(dir, &format!("{name}-{}", one.get_name()), one))
}

fn page(name: &str, command: Command) -> std::io::Result<Vec<u8>> {
    let examples = command.get_after_help().map(ToString::to_string);
    let has_commands = command.get_subcommands().next().is_some();
    let page = Man::new(command)
        // The index of the manual finds a page by its title.
        .title(name)
        .section(SECTION)
        .source(format!("offloadd {}", env!("CARGO_PKG_VERSION")));
    let mut text = Vec::new();
    page.render_title(&mut text)?;
    page.render_name_section(&mut text)?;
    page.render_synopsis_section(&mut text)?;
    page.render_options_section(&mut text)?;
    if has_commands {
        page.render_subcommands_section(&mut text)?;
    }
    if let Some(examples) = examples {
        // Without filling: examples are aligned in columns.
        write!(text, ".SH NOTES\n.nf\n{}\n.fi\n", literal(&examples))?;
    }
    Ok(text)
}

/// Escapes text for roff.
fn literal(text: &str) -> String {
    let line = |line: &str| {
        let escaped = line.replace('\\', "\\e").replace('-', "\\-");
        match escaped.starts_with(['.', '\'']) {
            true => format!("\\&{escaped}"),
            false => escaped,
        }
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roff_requests_and_hyphens_are_escaped() {
        assert_eq!(literal(".x\n'y\n a\\b --c"), "\\&.x\n\\&'y\n a\\eb \\-\\-c");
    }
}
