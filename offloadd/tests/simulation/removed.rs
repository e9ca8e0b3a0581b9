//! Disables each safeguard behind a promise, and checks that the test of the promise fails. Without this, a test that asserts nothing would look like
//! a kept promise.

use std::process::Command;

/// Runs one test of this executable with the safeguard `mechanism` disabled; the test must run, and fail.
fn fails_without(mechanism: &str, test: &str) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--test-threads", "1"])
        .env("OFFLOADD_DISABLE", mechanism)
        .env_remove("OFFLOADD_SEEDS")
        .output()
        .unwrap();
    let message = String::from_utf8_lossy(&output.stdout);
    assert!(
        message.contains("0 passed; 1 failed"),
        "{test} does not notice that {mechanism} is gone:\n{message}"
    );
}

#[test]
fn without_the_first_flush_tiles_are_lost() {
    fails_without(
        "first-flush",
        "rules::an_acknowledged_generation_survives_power_loss",
    );
}

#[test]
fn without_the_second_flush_records_are_lost() {
    fails_without(
        "second-flush",
        "rules::an_acknowledged_generation_survives_power_loss",
    );
}

#[test]
fn without_the_generation_check_late_writes_land() {
    fails_without(
        "generation-check",
        "rules::a_write_of_another_generation_is_refused",
    );
}

#[test]
fn without_writing_out_of_place_a_crash_mixes_generations() {
    fails_without(
        "out-of-place",
        "rules::writes_of_the_next_generation_leave_the_committed_one_alone",
    );
}

#[test]
fn without_waiting_for_io_memory_is_written_after_it_was_given_away() {
    fails_without(
        "reclaim-after-io",
        "rules::a_dead_process_keeps_its_arena_until_its_io_has_ended",
    );
}

#[test]
fn without_checksums_verify_finds_nothing() {
    fails_without("checksum", "format::a_flipped_bit_in_a_tile_is_named");
}

#[test]
fn without_a_flush_copies_are_lost() {
    fails_without(
        "copy-flush",
        "growth::coming::a_device_that_comes_takes_its_share_of_jobs_that_nobody_runs",
    );
}

#[test]
fn without_waiting_for_the_definition_what_a_tile_left_is_written_over() {
    fails_without(
        "leave-last",
        "growth::beside_jobs::what_a_tile_has_left_is_not_used_before_its_new_place_is_durable",
    );
}

#[test]
fn without_waiting_for_the_definition_commits_name_what_it_does_not() {
    fails_without(
        "exchange-first",
        "growth::beside_jobs::a_commit_waits_for_the_definition_that_says_where_its_tiles_lie",
    );
}

#[test]
fn without_incarnation_numbers_sessions_continue_over_what_another_daemon_wrote() {
    fails_without(
        "incarnations",
        "incarnations::a_daemon_that_served_without_the_sessions_ends_them",
    );
}

const NODES: &str = "nodes::nodes_resume_from_one_generation_that_is_whole_on_each";

#[test]
fn without_waiting_for_the_confirmation_another_node_s_generation_is_overwritten() {
    fails_without("confirm-first", NODES);
}

#[test]
fn without_the_least_of_all_nodes_a_generation_is_confirmed_that_one_lacks() {
    fails_without("least-prepared", NODES);
}

#[test]
fn without_the_start_in_its_identity_a_generation_is_a_mixture_of_two() {
    fails_without("same-start", NODES);
}

#[test]
fn without_the_flush_of_the_record_nodes_lose_what_they_have_prepared() {
    fails_without("second-flush", NODES);
}
