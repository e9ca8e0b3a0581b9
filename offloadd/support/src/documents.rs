//! Manual pages and shell completions, generated from the definition of the command line.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::{Args, Command};
use clap_complete::Shell;
use clap_mangen::Man;

use crate::console;

/// Section of the manual.
#[derive(Clone, Copy, Debug)]
pub enum Section {
    /// Commands of users.
    Users,
    /// Commands of administrators.
    Administrators,
}

impl Section {
    fn number(self) -> &'static str {
        match self {
            Self::Users => "1",
            Self::Administrators => "8",
        }
    }
}

/// Arguments of `completions`.
#[derive(Args, Debug)]
pub struct CompletionsArgs {
    /// Shell to complete for
    shell: Shell,
}

/// Arguments of `man`.
#[derive(Args, Debug)]
pub struct ManArgs {
    /// Directory to write to; created if missing
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

/// A page could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}: {source}", path.display())]
pub struct ManError {
    path: PathBuf,
    source: std::io::Error,
}

/// Prints the completion script of `command`.
pub fn completions(args: &CompletionsArgs, mut command: Command) {
    let mut text = Vec::new();
    let name = command.get_name().to_owned();
    clap_complete::generate(args.shell, &mut command, name, &mut text);
    console::out(format_args!("{}", String::from_utf8_lossy(&text)));
}

/// Writes one page for the program and one for each command and subcommand.
///
/// # Errors
/// The directory or a page cannot be written.
pub fn man(args: &ManArgs, section: Section, command: Command) -> Result<(), ManError> {
    std::fs::create_dir_all(&args.dir).map_err(|source| ManError {
        path: args.dir.clone(),
        source,
    })?;
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let name = command.get_name().to_owned();
    pages(&args.dir, section, &name, &command)
}

fn pages(dir: &Path, section: Section, name: &str, command: &Command) -> Result<(), ManError> {
    let path = dir.join(format!("{name}.{}", section.number()));
    page(name, section, command.clone())
        .and_then(|text| std::fs::write(&path, text))
        .map_err(|source| ManError { path, source })?;
    (command.get_subcommands())
        .filter(|one| !one.is_hide_set())
        .try_for_each(|one| pages(dir, section, &format!("{name}-{}", one.get_name()), one))
}

fn page(name: &str, section: Section, command: Command) -> std::io::Result<Vec<u8>> {
    let examples = command.get_after_help().map(ToString::to_string);
    let has_commands = command.get_subcommands().next().is_some();
    let page = Man::new(command)
        // The index of the manual finds a page by its title.
        .title(name)
        .section(section.number())
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
