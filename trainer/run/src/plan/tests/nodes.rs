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

const ALL: (&str, &str) = ("offload.shard", "all");

#[test]
fn a_node_sends_four_bytes_for_each_parameter_that_other_nodes_own_and_six_without_a_copy() {
    for nodes in [1, 2, 8] {
        for (changes, a_parameter) in [(vec![], 4.0), (vec![(ALL.0, json!(ALL.1))], 6.0)] {
            let plan = on_nodes(nodes, &changes);
            let params = plan.params_count as f64;
            let elsewhere = f64::from(nodes - 1) / f64::from(nodes);
            let sent = plan.network_bytes as f64;
            // Shards are rounded up to whole tiles.
            let wanted = a_parameter * params * elsewhere;
            assert!((wanted..=1.1 * wanted).contains(&sent), "{nodes}: {sent}");
            assert_eq!(plan.rates.network_s, sent / 1e9);
        }
    }
}

#[test]
fn a_copy_takes_two_bytes_a_parameter_on_each_node_and_spares_drives_the_reads_of_backward() {
    let [copy, all] = [vec![], vec![(ALL.0, json!(ALL.1))]].map(|changes| on_nodes(4, &changes));
    let node_bytes = copy.node_copy_bytes() as f64;
    let wanted = 2.0 * copy.params_count as f64;
    assert!(
        (wanted..=1.01 * wanted).contains(&node_bytes),
        "{node_bytes}"
    );
    assert_eq!(copy.host_bytes() - all.host_bytes(), copy.copy_bytes);
    assert_eq!(
        (all.copy_bytes, copy.node_bytes.backward_read_bytes),
        (0, 0.0)
    );
    assert!(all.node_bytes.backward_read_bytes > 0.0);
    assert!(copy.bound.s < all.bound.s);
    let said = copy.to_string();
    assert!(
        said.contains("\nnetwork   each node keeps a copy of all parameters in host memory, "),
        "{said}"
    );
    let said = all.to_string();
    assert!(
        said.contains("\nnetwork   the parameters are divided over all nodes (offload.shard); "),
        "{said}"
    );
    // One node, and stages that keep parameters whole, have no use for a copy.
    assert_eq!(on_nodes(1, &[]).copy_bytes, 0);
    let stage = ("zero_optimization.stage", json!(2));
    let mut settings = large("none", "none", &[stage, ("train.ranks", json!(4))]);
    settings.local_ranks = 2;
    assert_eq!(plan(&settings, &h200(1.0)).copy_bytes, 0);
}

#[test]
fn block_inputs_of_other_nodes_take_no_space_on_a_nodes_drives() {
    for nodes in [1, 2] {
        let place = |place: &str| on_nodes(nodes, &[("offload.activations", json!(place))]);
        let (host, drives) = (place("cpu"), place("nvme"));
        let bytes = drives.device_input_bytes();
        // A node has two ranks.
        assert_eq!(bytes, 2 * drives.swapper.scratch.bytes());
        assert_eq!(drives.device_bytes() - host.device_bytes(), bytes);
    }
}

#[test]
fn a_node_without_room_keeps_no_copy_and_says_so() {
    let copy = on_nodes(4, &[]);
    let without = copy.host_bytes() - copy.copy_bytes;
    // The choices leave a tenth of the memory unused.
    let least = |bytes: u64| (2 * bytes) as f64 / 0.9;
    let with_memory = |bytes: f64| {
        let machine = Overrides {
            host_memory_bytes: Some(bytes as u64),
            network_bytes_per_s: Some(1e9),
            ..h200(4.0)
        };
        let changes = [
            ("train.ranks", json!(8)),
            ("offload.staging_bytes", json!(copy.memory.staging_bytes())),
        ];
        let mut settings = large("nvme", "nvme", &changes);
        settings.local_ranks = 2;
        plan(&settings, &machine)
    };
    assert!(with_memory(1.01 * least(copy.host_bytes())).copy_bytes > 0);
    let short = with_memory(1.01 * least(without));
    assert_eq!(short.copy_bytes, 0);
    assert_eq!(short.problems(), []);
    let said = short.to_string();
    assert!(said.contains("chosen    offload.shard = all: host memory has no room for a copy of all parameters on each node, "), "{said}");
}

#[test]
fn no_copy_is_kept_if_tiles_in_its_place_shorten_the_step() {
    // Slow drives, and memory for all tiles.
    let with_network = |host_memory_bytes: u64, bytes_per_s: f64, shard: &str| {
        let changes = [
            ("train.ranks", json!(8)),
            ("offload.resident_fraction", json!("auto")),
            (ALL.0, json!(shard)),
        ];
        let mut settings = large("nvme", "nvme", &changes);
        settings.local_ranks = 2;
        let machine = Overrides {
            host_memory_bytes: Some(host_memory_bytes),
            network_bytes_per_s: Some(bytes_per_s),
            read_bytes_per_s: Some(1e9),
            write_bytes_per_s: Some(1e9),
            ..h200(4.0)
        };
        plan(&settings, &machine)
    };
    let all = with_network(100 << 30, 100e9, "all");
    assert_eq!(all.node_bytes.read_bytes(), 0.0);
    let memory = (2 * all.host_bytes()) as f64 * 1.02 / 0.9;
    let fast = with_network(memory as u64, 100e9, "auto");
    assert_eq!(fast.copy_bytes, 0);
    assert!(
        fast.to_string().contains("takes host memory from tiles"),
        "{fast}"
    );
    assert!(with_network(memory as u64, 0.1e9, "auto").copy_bytes > 0);
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
            .contains("; each of 8 nodes sends and receives")
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
