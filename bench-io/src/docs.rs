//! Tests that the command reference and the shell lines in documents match the program.

use clap::CommandFactory;

use super::Arguments;

#[test]
fn the_command_reference_in_docs_is_current() {
    docs_test::assert_page(
        "docs/cli/bench-io.md",
        &docs_test::reference(Arguments::command()),
    );
}

#[test]
fn documents_call_commands_that_exist() {
    docs_test::assert_commands_parse(&Arguments::command());
}
