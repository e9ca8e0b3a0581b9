//! Tests that space is never given twice or lost, and that devices get the shares that their rates call for.

use super::*;
use crate::store::definition::{Durability, Tile, TileKind};

fn space<const N: usize>(devices: [(u64, u64); N]) -> Space {
    let mut space = Space::new(DeviceIndex(0));
    for (data_bytes, rate) in devices {
        space.add(data_bytes, rate);
    }
    space
}

fn definition(tiles: u32, tile_bytes: u32) -> JobDefinition {
    let tile = |unit| Tile {
        unit,
        kind: TileKind::State,
        elem_offset: 0,
        tile_bytes,
    };
    let tiles = (0..tiles).map(tile).collect();
    JobDefinition::new(Vec::new(), tiles, Durability::Committed, 1).unwrap()
}

/// With free pieces of many sizes, `would_lie` returns the same places as taking them, and changes nothing.
#[test]
fn where_ranges_would_lie_is_where_they_are_taken() {
    let device = DeviceIndex(0);
    let mut refused = 0;
    for seed in 0..200_u64 {
        let number = |nth: u64| (seed + 1).wrapping_mul(nth + 7).wrapping_mul(0x9E37_79B9) >> 8;
        let mut space = space([(64 * 4096, 0), (64 * 4096, 0)]);
        for nth in 0..8 {
            let offset = DATA_OFFSET + number(nth) % 64 * 4096;
            // Takes nothing where another extent lies already.
            let _ = space.allocate(Extent { device, offset }, 4096);
        }
        let count = 1 + number(20) % 9;
        let sizes: Vec<u64> = (0..count)
            .map(|nth| (1 + number(nth) % 12) * 4096)
            .collect();
        let before = space.clone();
        let told = space.would_lie(device, &sizes);
        assert_eq!(space, before);
        let mut take = |bytes: &u64| Some(space.take_on(device, *bytes, false)?.offset);
        let taken: Option<Vec<u64>> = sizes.iter().map(&mut take).collect();
        refused += u32::from(taken.is_none());
        assert_eq!(told, taken, "seed {seed}: {sizes:?}");
    }
    assert!((20..180).contains(&refused), "{refused}");
}

#[test]
fn records_without_space_in_one_piece_are_named() {
    let definition = definition(4, 4096);
    let area_bytes = area_at(0, &definition, 1).bytes();
    let blocks_bytes = area_bytes.next_multiple_of(4096);
    let mut parted = space([(2 * blocks_bytes, 0), (1 << 30, 0)]);
    let middle = Extent {
        device: DeviceIndex(0),
        offset: DATA_OFFSET + blocks_bytes - 4096,
    };
    assert!(parted.allocate(middle, 8192));
    let no_room = parted.reserve(&definition, 1).unwrap_err();
    assert_eq!(no_room.no_area, Some((area_bytes, blocks_bytes - 4096)));
    let no_room = space([(4096, 0), (1 << 30, 0)])
        .reserve(&definition, 1)
        .unwrap_err();
    assert_eq!(no_room.no_area, Some((area_bytes, 4096)));
    let no_room = space([(blocks_bytes, 0), (4096, 0)])
        .reserve(&definition, 1)
        .unwrap_err();
    assert_eq!(no_room.no_area, None);
}

#[test]
fn tiles_go_to_devices_in_proportion_to_their_rates_and_alternate() {
    let mut space = space([(1 << 30, 300), (1 << 30, 100)]);
    let reservation = space.reserve(&definition(400, 1 << 20), 1).unwrap();
    let on_first = reservation
        .extents
        .iter()
        .filter(|e| e[0].device.0 == 0)
        .count();
    assert_eq!(on_first, 300);
    let longest = reservation
        .extents
        .chunk_by(|a, b| a[0].device == b[0].device)
        .map(<[_]>::len)
        .max();
    assert_eq!(
        longest,
        Some(3),
        "three tiles in a row, then the other device"
    );
}

#[test]
fn a_device_with_little_room_has_tiles_all_along_the_table() {
    let mut space = space([(1 << 30, 100), (100 << 20, 100), (1 << 30, 200)]);
    let reservation = space.reserve(&definition(400, 1 << 20), 1).unwrap();
    let devices: Vec<u32> = (reservation.extents.iter())
        .map(|e| e[0].device.0)
        .collect();
    let on = |device: u32| devices.iter().filter(|&&d| d == device).count();
    // 50 tiles fill device 0; the rest goes to the other two in the ratio one to two.
    assert_eq!([on(0), on(1), on(2)].iter().sum::<usize>(), 400);
    assert!((49..=50).contains(&on(1)), "{}", on(1));
    assert!((116..=118).contains(&on(0)), "{}", on(0));
    for part in devices.chunks(100) {
        let here = part.iter().filter(|&&d| d == 1).count();
        assert!((11..=14).contains(&here), "{here} of a hundred tiles");
    }
}

#[test]
fn many_devices_with_few_tiles_each_give_a_new_one_its_share() {
    for (old, tiles_each) in [(2, 15), (3, 1), (8, 4), (8, 5), (15, 2)] {
        let mut space = Space::new(DeviceIndex(0));
        for _ in 0..=old {
            space.add(1 << 30, 100);
        }
        let tiles: Vec<_> = (0..old * tiles_each)
            .map(|tile| (2 << 20, [DeviceIndex(tile % old); 2]))
            .collect();
        let new = DeviceIndex(old);
        let come = space.targets(&tiles, &[new]);
        assert!(come.iter().all(|&(_, target)| target == new));
        let share = tiles.len() as f64 / f64::from(old + 1);
        let found = come.len() as f64;
        assert!((found - share).abs() <= 1.0, "{found} tiles of {share}");
        for device in 0..old {
            let gives = |&&(tile, _): &&(u32, DeviceIndex)| tile % old == device;
            let given = come.iter().filter(gives).count() as f64;
            assert!((given - share / f64::from(old)).abs() <= 1.0, "{given}");
        }
    }
}

#[test]
fn a_rate_counts_the_slower_way_more() {
    assert_eq!(rate(6_000, 3_000), 2_000);
    assert_eq!(rate(6_000, 1_000), 857);
    assert_eq!((rate(0, 5), rate(5, 0), rate(0, 0)), (0, 0, 0));
    assert_eq!(rate(u64::MAX, u64::MAX), u64::MAX / 2);
}

#[test]
fn what_is_given_back_can_be_taken_again_and_nothing_overlaps() {
    let mut space = space([(64 << 20, 0), (64 << 20, 0)]);
    let fresh = space.clone();
    let definition = definition(10, 1 << 20);
    let one = space.reserve(&definition, 2).unwrap();
    let two = space.reserve(&definition, 2).unwrap();
    let mut ranges: Vec<(u32, u64)> = one
        .extents
        .iter()
        .chain(&two.extents)
        .flatten()
        .map(|e| (e.device.0, e.offset))
        .collect();
    ranges.sort_unstable();
    let apart = ranges
        .windows(2)
        .all(|w| w[0].0 != w[1].0 || w[1].1 - w[0].1 >= 1 << 20);
    assert!(apart);
    space.release(&definition, &one.area, &one.extents);
    space.release(&definition, &two.area, &two.extents);
    assert_eq!(space, fresh);
}

#[test]
fn frozen_tiles_take_one_extent() {
    let mut space = space([(64 << 20, 0), (64 << 20, 0)]);
    let fresh = space.clone();
    let plain = definition(8, 1 << 20);
    let mut tiles = plain.tiles().to_vec();
    for tile in &mut tiles[..6] {
        tile.kind = TileKind::Frozen;
    }
    let frozen = JobDefinition::new(Vec::new(), tiles, Durability::Committed, 1).unwrap();
    let taken = space.reserve(&frozen, 1).unwrap();
    assert_eq!(taken.bytes - taken.area.bytes(), 10 << 20);
    for (tile, extents) in taken.extents.iter().enumerate() {
        assert_eq!(extents[0] == extents[1], tile < 6, "tile {tile}");
    }
    // Equal rates: as many bytes on each.
    let on_first = (taken.extents.iter().zip(frozen.tiles()))
        .filter(|(extents, _)| extents[0].device.0 == 0)
        .map(|(_, tile)| frozen.reserved_bytes(tile))
        .sum::<u64>();
    assert_eq!(on_first, 5 << 20);
    let mut again = fresh.clone();
    assert!(again.retake(&frozen, &taken.area, &taken.extents));
    assert_eq!(again, space);
    let mut parted = taken.extents.clone();
    parted[0][1].offset += 1 << 20;
    assert!(!fresh.clone().retake(&frozen, &taken.area, &parted));
    space.release(&frozen, &taken.area, &taken.extents);
    assert_eq!(space, fresh);
}

#[test]
fn single_tiles_are_spread_too_and_take_all_or_nothing() {
    let mut space = space([(4 << 20, 300), (4 << 20, 100)]);
    let fresh = space.clone();
    let extents = space.reserve_tiles(&[1 << 20; 4]).unwrap();
    let on_first = extents.iter().filter(|e| e.device.0 == 0).count();
    assert_eq!(on_first, 3);
    for extent in extents {
        space.give(extent, 1 << 20);
    }
    assert_eq!(space, fresh);
    let no_room = space.reserve_tiles(&[1 << 20; 9]).unwrap_err();
    assert_eq!(no_room.needed_bytes, 9 << 20);
    assert_eq!(space, fresh);
}

#[test]
fn a_job_that_does_not_fit_takes_nothing() {
    let mut space = space([(4 << 20, 0), (64 << 20, 0)]);
    let fresh = space.clone();
    let no_room = space.reserve(&definition(100, 1 << 20), 1).unwrap_err();
    assert!(no_room.needed_bytes > 200 << 20);
    assert_eq!(no_room.free_bytes, [4 << 20, 64 << 20]);
    assert_eq!(space, fresh);
}
