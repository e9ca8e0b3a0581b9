//! Converts messages to checked calls. Invalid fields of a message are refused here, by name.

use offload_api::fault::{Fault, FaultKind};
use offload_api::geometry::SlotClass;
use offload_api::ids::{Rank, SessionToken};
use offload_api::proto;
use offload_api::{IODEPTH_MAX, PROTOCOL_VERSION};

use crate::core::{Call, OpenSession};
use crate::store::definition::{Durability, JobDefinition, JobName, Tile};

/// Limit of slot classes per session; tiles have a few sizes.
const CLASSES_MAX: usize = 64;

/// Limit of a job's ranks on all nodes.
const RANKS_MAX: u32 = 1 << 20;

pub(super) fn invalid(message: String) -> Fault {
    Fault::new(FaultKind::Invalid, message)
}

pub(super) fn token(bytes: &[u8]) -> Result<SessionToken, Fault> {
    SessionToken::from_bytes(bytes)
        .ok_or_else(|| invalid(format!("token of {} bytes: a token has 16", bytes.len())))
}

pub(super) fn open(message: proto::OpenSessionRequest) -> Result<Call, Fault> {
    let proto::OpenSessionRequest {
        protocol_version,
        job,
        rank,
        local_ranks,
        classes,
        iodepth,
    } = message;
    if protocol_version != PROTOCOL_VERSION {
        return Err(Fault::new(
            FaultKind::Version,
            format!(
                "the process speaks protocol version {protocol_version}, offloadd {} speaks {PROTOCOL_VERSION}: use offloadd \
                 and trainer of one build",
                env!("CARGO_PKG_VERSION")
            ),
        ));
    }
    if rank >= RANKS_MAX {
        return Err(invalid(format!(
            "rank {rank} exceeds the limit of {}",
            RANKS_MAX - 1
        )));
    }
    if local_ranks == 0 || local_ranks > RANKS_MAX {
        return Err(invalid(format!(
            "{local_ranks} local ranks is not from 1 to {RANKS_MAX}"
        )));
    }
    if iodepth == 0 || iodepth > IODEPTH_MAX {
        return Err(invalid(format!(
            "iodepth {iodepth} is not from 1 to {IODEPTH_MAX}"
        )));
    }
    if classes.is_empty() || classes.len() > CLASSES_MAX {
        return Err(invalid(format!(
            "{} slot classes is not from 1 to {CLASSES_MAX}",
            classes.len()
        )));
    }
    let classes = classes.iter().map(SlotClass::from);
    let mut random = [0; 16];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .ok()
        .filter(|bytes| *bytes == random.len())
        .ok_or_else(|| {
            let what = "cannot get random bytes for a token";
            Fault::new(FaultKind::Stopping, what)
        })?;
    Ok(Call::Open(OpenSession {
        token: SessionToken(random),
        job: JobName::new(job)?,
        rank: Rank(rank),
        local_ranks,
        classes: classes.collect(),
        iodepth,
    }))
}

pub(super) fn define(message: proto::DefineTilesRequest) -> Result<Call, Fault> {
    let tiles = message.tiles.iter().map(Tile::try_from);
    let tiles = tiles.collect::<Result<Vec<_>, Fault>>()?;
    let durability = Durability::check(message.durability)?;
    Ok(Call::Define {
        token: token(&message.token)?,
        definition: JobDefinition::new(message.layout, tiles, durability, message.nodes)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole() -> proto::OpenSessionRequest {
        proto::OpenSessionRequest {
            protocol_version: PROTOCOL_VERSION,
            job: "tiny".into(),
            rank: 0,
            local_ranks: 1,
            classes: vec![proto::SlotClass {
                slot_bytes: 4096,
                slot_count: 1,
            }],
            iodepth: 4,
        }
    }

    #[test]
    fn another_protocol_version_is_refused_naming_both() {
        let message = proto::OpenSessionRequest {
            protocol_version: 77,
            ..whole()
        };
        let fault = open(message).unwrap_err();
        assert_eq!(fault.kind, FaultKind::Version);
        assert!(fault.message.contains("version 77"), "{fault}");
        assert!(
            fault
                .message
                .contains(&format!("speaks {PROTOCOL_VERSION}")),
            "{fault}"
        );
    }

    #[test]
    fn an_open_outside_its_limits_is_refused_before_the_core_sees_it() {
        let kind = |change: fn(&mut proto::OpenSessionRequest)| {
            let mut message = whole();
            change(&mut message);
            open(message).map(|_| ()).map_err(|fault| fault.kind)
        };
        assert_eq!(kind(|_| {}), Ok(()));
        for change in [
            (|m| m.job = "../x".into()) as fn(&mut proto::OpenSessionRequest),
            |m| m.job = String::new(),
            |m| m.rank = u32::MAX,
            |m| m.local_ranks = 0,
            |m| m.iodepth = 0,
            |m| m.iodepth = IODEPTH_MAX + 1,
            |m| m.classes.clear(),
            |m| m.classes = vec![proto::SlotClass::default(); CLASSES_MAX + 1],
        ] {
            assert_eq!(kind(change), Err(FaultKind::Invalid));
        }
    }

    #[test]
    fn tokens_differ_and_hostile_definitions_are_refused() {
        let token_of = || match open(whole()) {
            Ok(Call::Open(request)) => request.token,
            other => panic!("{other:?}"),
        };
        assert_ne!(token_of(), token_of());

        let tile = proto::Tile {
            unit: 0,
            kind: 1,
            elem_offset: 0,
            tile_bytes: 4096,
        };
        let whole = proto::DefineTilesRequest {
            token: vec![0; 16],
            layout: Vec::new(),
            tiles: vec![tile],
            durability: 1,
            nodes: 1,
        };
        assert!(define(whole.clone()).is_ok());
        for change in [
            (|m| m.token = vec![0; 15]) as fn(&mut proto::DefineTilesRequest),
            |m| m.tiles[0].kind = -1,
            |m| m.tiles[0].kind = 5,
            |m| m.tiles[0].tile_bytes = 4095,
            |m| m.tiles.clear(),
            |m| m.durability = 0,
            |m| m.nodes = 0,
        ] {
            let mut message = whole.clone();
            change(&mut message);
            assert_eq!(define(message).unwrap_err().kind, FaultKind::Invalid);
        }
    }
}
