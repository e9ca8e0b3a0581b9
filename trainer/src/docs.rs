//! Tests that the command reference and the shell commands in documents match the program.

use clap::CommandFactory;

use super::Cli;

#[test]
fn the_command_reference_in_docs_is_current() {
    docs_test::assert_page("docs/cli/trainer.md", &docs_test::reference(Cli::command()));
}

#[test]
fn documents_call_commands_that_exist() {
    docs_test::assert_commands_parse(&Cli::command());
}
