//! What is written about the program, from its own definition: pages of the manual, completions of shells.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;

/// A daemon and its administrator's commands.
const SECTION: &str = "8";

pub(crate) fn completions(shell: Shell, mut command: Command) -> Result<()> {
    let mut text = Vec::new();
    let name = command.get_name().to_owned();
    clap_complete::generate(shell, &mut command, name, &mut text);
    // A reader that goes away has seen enough.
    match std::io::stdout().write_all(&text) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("printing the completions"),
    }
}

/// One page for the program and one for each command.
pub(crate) fn man(dir: &Path, command: Command) -> Result<()> {
    std::fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let name = command.get_name().to_owned();
    let commands: Vec<_> = (command.get_subcommands())
        .map(|one| (format!("{name}-{}", one.get_name()), one.clone()))
        .collect();
    for (name, one) in commands.into_iter().chain([(name, command)]) {
        let path = dir.join(format!("{name}.{SECTION}"));
        let text = page(&name, one).context("writing a page of the manual")?;
        std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

fn page(name: &str, command: Command) -> std::io::Result<Vec<u8>> {
    let examples = command.get_after_help().map(ToString::to_string);
    let has_commands = command.get_subcommands().next().is_some();
    let page = Man::new(command)
        // The manual's index finds a page by the name in it.
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
        // As it stands: lines and columns mean something.
        write!(text, ".SH NOTES\n.nf\n{}\n.fi\n", literal(&examples))?;
    }
    Ok(text)
}

/// Text that the manual's formatter leaves alone.
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
    fn what_a_formatter_would_take_for_its_own_is_escaped() {
        assert_eq!(literal(".x\n'y\n a\\b --c"), "\\&.x\n\\&'y\n a\\eb \\-\\-c");
    }
}
