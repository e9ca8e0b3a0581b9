//! Decodes arbitrary bytes as the message of each call, and checks the parts that the daemon computes from it before it decides anything: the places
//! of slots, a job's definition. The first byte selects the call.

#![no_main]

use libfuzzer_sys::fuzz_target;
use offloadd::api::geometry::{Geometry, SlotClass};
use offloadd::api::ids::SlotIndex;
use offloadd::api::proto;
use offloadd::store::definition::{Durability, JobDefinition, JobName, Tile};
use prost::Message;

/// Decodes a message and checks that encoding it again gives the same message.
fn read<M: Message + Default + PartialEq + std::fmt::Debug>(bytes: &[u8]) -> Option<M> {
    let message = M::decode(bytes).ok()?;
    let again = M::decode(&message.encode_to_vec()[..]).expect("own bytes");
    assert!(again == message, "{again:?} of {message:?}");
    Some(message)
}

fn open_session(message: proto::OpenSessionRequest) {
    let classes: Vec<_> = (message.classes.iter())
        .map(|class| SlotClass {
            slot_bytes: class.slot_bytes,
            slot_count: class.slot_count,
        })
        .collect();
    let _ = JobName::new(message.job);
    let Ok(geometry) = Geometry::new(&classes) else {
        return;
    };
    let mut end = 0;
    for slot in 0..geometry.slot_count().min(1000) {
        let place = geometry.slot_place(SlotIndex(slot)).expect("it was counted");
        assert!(place.offset >= end, "slot {slot} overlaps the one before");
        end = place.offset + place.bytes;
        assert!(end <= geometry.arena_bytes(), "slot {slot} lies outside");
    }
    assert_eq!(geometry.slot_place(SlotIndex(geometry.slot_count())), None);
}

fn define_tiles(message: proto::DefineTilesRequest) {
    let Ok(durability) = Durability::check(message.durability) else {
        return;
    };
    let tiles = message.tiles.iter().filter_map(|tile| Tile::try_from(tile).ok());
    let definition = JobDefinition::new(message.layout, tiles.collect(), durability, message.nodes);
    if let Ok(definition) = definition {
        let whole = |tile: &Tile| tile.tile_bytes > 0 && tile.tile_bytes.is_multiple_of(4096);
        assert!(definition.tiles().iter().all(whole));
        assert!((1..).contains(&definition.nodes()));
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Some((call, bytes)) = bytes.split_first() else {
        return;
    };
    match call % 11 {
        0 => read(bytes).into_iter().for_each(open_session),
        1 => read(bytes).into_iter().for_each(define_tiles),
        2 => drop(read::<proto::ReserveScratchRequest>(bytes)),
        3 => drop(read::<proto::ResumeRequest>(bytes)),
        4 => drop(read::<proto::CommitRequest>(bytes)),
        5 => drop(read::<proto::ConfirmRequest>(bytes)),
        6 => drop(read::<proto::DropJobRequest>(bytes)),
        7 => drop(read::<proto::ReportDamageRequest>(bytes)),
        8 => drop(read::<proto::AddDeviceRequest>(bytes)),
        9 => drop(read::<proto::ScrubRequest>(bytes)),
        _ => drop(read::<proto::CloseSessionRequest>(bytes)),
    }
});
