//! Plans of runs on several nodes.

use super::*;

fn on_nodes(nodes: u32, changes: &[(&str, Value)]) -> Plan {
    let mut changes = changes.to_vec();
    changes.push(("train.ranks", json!(2 * nodes)));
    let mut settings = large("nvme", "nvme", &changes);
    settings.local_ranks = 2;
    let machine = Overrides {
        network_bytes_per_s: Some(1e9),
        ..h200(4.0)
    };
    plan(&settings, &machine)
}

#[test]
fn a_node_sends_six_bytes_for_each_parameter_that_other_nodes_own() {
    for nodes in [1, 2, 8] {
        let plan = on_nodes(nodes, &[]);
        let params = plan.params_count as f64;
        let elsewhere = f64::from(nodes - 1) / f64::from(nodes);
        let sent = plan.network_bytes as f64;
        // Shards are rounded up to whole tiles.
        let wanted = 6.0 * params * elsewhere;
        assert!((wanted..=1.1 * wanted).contains(&sent), "{nodes}: {sent}");
        assert_eq!(plan.rates.network_s, sent / 1e9);
    }
}

#[test]
fn lower_stages_send_each_parameter_once() {
    let stage = ("zero_optimization.stage", json!(2));
    let mut settings = large("none", "none", &[stage, ("train.ranks", json!(4))]);
    settings.local_ranks = 2;
    let plan = plan(&settings, &h200(1.0));
    let wanted = 4.0 * plan.params_count as f64 / 2.0;
    let sent = plan.network_bytes as f64;
    assert!((wanted..=1.1 * wanted).contains(&sent), "{sent}");
}

#[test]
fn a_slow_network_limits_a_step_and_is_named() {
    let plan = on_nodes(8, &[]);
    assert_eq!(plan.bound.wall, swapper::Wall::Network);
    assert!(
        plan.to_string()
            .contains("\nnetwork   each of 8 nodes sends and receives")
    );
    assert_eq!(on_nodes(1, &[]).network_bytes, 0);
}

#[test]
fn the_state_of_a_node_shrinks_with_the_number_of_nodes() {
    let [one, four] = [on_nodes(1, &[]), on_nodes(4, &[])];
    let ratio = four.node_bytes.written_bytes / one.node_bytes.written_bytes;
    assert!((0.25..0.28).contains(&ratio), "{ratio}");
    assert_eq!(four.tokens, 4 * one.tokens);
}
