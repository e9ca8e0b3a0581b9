//! Makes a Markdown page of a program's commands and options from its clap definition.

use std::fmt::Write;

use clap::{Arg, ArgAction, Command};

/// Returns a page with each command: its purpose, usage, arguments, options and examples. Hidden commands are left out.
pub fn reference(mut program: Command) -> String {
    program = program.disable_help_subcommand(true);
    program.build();
    let mut text = format!("# `{}`\n\n", program.get_name());
    text += "Generated from the program by `make docs`; a test keeps it current. Every command has `--help`.\n";
    write_command(&mut text, &mut program, "");
    text
}

fn write_command(text: &mut String, command: &mut Command, parents: &str) {
    let name = format!("{parents}{}", command.get_name());
    if !parents.is_empty() {
        let _ = write!(text, "\n## `{name}`\n");
    }
    let about = command.get_long_about().or(command.get_about());
    if let Some(about) = about {
        let _ = write!(text, "\n{}\n", markdown(&about.to_string()));
    }
    let usage = command.render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ");
    let _ = write!(
        text,
        "\n```text\n{}\n```\n",
        usage.replace("\n       ", "\n")
    );
    let shown: Vec<&Arg> = command
        .get_arguments()
        .filter(|arg| !arg.is_hide_set() && !is_automatic(arg))
        .collect();
    if !shown.is_empty() {
        text.push_str("\n| argument | meaning |\n|---|---|\n");
        for arg in shown {
            let _ = writeln!(
                text,
                "| `{}` | {} |",
                spelled(arg).replace('|', "\\|"),
                cell(&meaning(arg))
            );
        }
    }
    if let Some(after) = command.get_after_long_help().or(command.get_after_help()) {
        write_after(text, &after.to_string());
    }
    let name = format!("{name} ");
    for command in command.get_subcommands_mut() {
        if !command.is_hide_set() {
            write_command(text, command, &name);
        }
    }
}

/// Whether clap adds the argument to every program.
fn is_automatic(arg: &Arg) -> bool {
    matches!(arg.get_id().as_str(), "help" | "version")
}

/// Returns the argument as a user writes it: `--rate <RATE>`, `-v, --verbose`, `<DEVICE>...`; with its other names.
fn spelled(arg: &Arg) -> String {
    let values = arg.get_value_names().unwrap_or_default();
    let values: Vec<String> = values.iter().map(|value| format!("<{value}>")).collect();
    let dots = match arg.get_action() {
        ArgAction::Append => "...",
        _ => "",
    };
    let Some(long) = arg.get_long() else {
        return format!("{}{dots}", values.join(" "));
    };
    let short = arg.get_short().map(|short| format!("-{short}"));
    let others = arg.get_visible_aliases().unwrap_or_default();
    let names = [long].into_iter().chain(others);
    let names: Vec<_> = short
        .into_iter()
        .chain(names.map(|name| format!("--{name}")))
        .collect();
    let names = names.join(", ");
    match arg.get_action().takes_values() {
        true => format!("{names} {}{dots}", values.join(" ")),
        false => names,
    }
}

fn meaning(arg: &Arg) -> String {
    let help = arg.get_long_help().or(arg.get_help());
    let mut text = help.map(ToString::to_string).unwrap_or_default();
    if !arg.get_action().takes_values() {
        return text;
    }
    let choices: Vec<_> = (arg.get_possible_values().iter())
        .filter(|value| !value.is_hide_set())
        .map(|value| format!("`{}`", value.get_name()))
        .collect();
    if !choices.is_empty() {
        let _ = write!(text, ". One of {}", choices.join(", "));
    }
    let defaults: Vec<_> = arg
        .get_default_values()
        .iter()
        .map(|value| format!("`{}`", value.display()))
        .collect();
    if !defaults.is_empty() {
        let _ = write!(text, ". Default: {}", defaults.join(" "));
    }
    text.replace(".. ", ". ")
}

/// Escapes text for a cell of a table.
fn cell(text: &str) -> String {
    markdown(text)
        .replace('|', "\\|")
        .replace("\n\n", "<br>")
        .replace('\n', " ")
}

/// Escapes help text for Markdown, where it contains no tags.
fn markdown(text: &str) -> String {
    text.trim().replace('<', "\\<")
}

/// Writes the text after the options: examples as shell lines, other lines unchanged, because their columns are aligned.
fn write_after(text: &mut String, after: &str) {
    for paragraph in after.split("\n\n") {
        let (head, rest) = paragraph.split_once('\n').unwrap_or((paragraph, ""));
        match head {
            "Example:" | "Examples:" => {
                let lines: Vec<&str> = rest
                    .lines()
                    .map(|line| line.strip_prefix("  ").unwrap_or(line))
                    .collect();
                let _ = write!(text, "\n```sh\n{}\n```\n", lines.join("\n"));
            }
            _ if paragraph.lines().any(|line| line.starts_with("  ")) => {
                let _ = write!(text, "\n```text\n{paragraph}\n```\n");
            }
            _ => {
                let _ = write!(text, "\n{}\n", markdown(paragraph));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_what_help_says_and_no_hidden_command() {
        let program = Command::new("tool").about("Does things").subcommand(
            Command::new("run")
                .about("Runs a|b")
                .arg(Arg::new("file").value_name("FILE|DIR").help("The file <X>"))
                .arg(
                    Arg::new("rate")
                        .long("rate")
                        .visible_alias("speed")
                        .value_name("RATE")
                        .default_value("1")
                        .help("How fast"),
                )
                .arg(
                    Arg::new("force")
                        .long("force")
                        .short('f')
                        .action(ArgAction::SetTrue)
                        .help("In any case"),
                )
                .after_help("Examples:\n  tool run a    # fast\n\nMore words."),
        );
        let page = reference(program.subcommand(Command::new("inner").hide(true)));
        for part in [
            "# `tool`\n",
            "Does things",
            "## `tool run`\n\nRuns a|b\n",
            "```text\ntool run [OPTIONS] [FILE|DIR]\n```",
            "| `<FILE\\|DIR>` | The file \\<X> |\n",
            "| `--rate, --speed <RATE>` | How fast. Default: `1` |\n",
            "| `-f, --force` | In any case |\n",
            "```sh\ntool run a    # fast\n```\n\nMore words.\n",
        ] {
            assert!(page.contains(part), "{part:?} is not in\n{page}");
        }
        assert!(!page.contains("inner"), "{page}");
    }
}
