//! Adopts the sessions that the previous daemon handed over.

use offload_api::ring::RingPositions;
use offload_support::units::CountOf;

use crate::core::Core;
use crate::driver::{InheritedSession, InheritedSessions};
use crate::handover::FoundHandover;
use crate::handover::inherited::InheritedDescriptors;

/// Adopts the sessions of the previous daemon. Returns them and the names of all descriptors that this process inherited.
pub(super) fn adopt(
    core: &mut Core,
    given: InheritedDescriptors,
) -> (Option<InheritedSessions>, Vec<String>) {
    let names: Vec<String> = given.iter().map(|(name, _)| name.clone()).collect();
    let mut found = match FoundHandover::among(given) {
        Ok(None) => return (None, names),
        Ok(Some(found)) => found,
        Err(refused) => {
            tracing::warn!(%refused, "cannot adopt the sessions of the previous daemon; they end");
            return (None, names);
        }
    };
    if found.state.sessions.is_empty() {
        return (None, names);
    }
    let numbers = found.state.sessions.iter().map(|session| session.number);
    let mut descriptors: Vec<_> = (numbers.collect::<Vec<_>>().into_iter())
        .map(|number| found.descriptors(number))
        .collect();
    let state = found.state;
    let (adopted, left_out) = match core.adopt(&state, |index| descriptors[index].is_some()) {
        Ok(adopted) => adopted,
        Err(why) => {
            tracing::warn!(
                why,
                "cannot adopt the sessions of the previous daemon; they end"
            );
            return (None, names);
        }
    };
    for why in left_out {
        tracing::warn!(
            "the previous daemon handed over sessions that cannot be adopted; they end: {why}"
        );
    }
    if adopted.is_empty() {
        return (None, names);
    }
    tracing::info!(
        "adopted {} of the previous daemon",
        CountOf(adopted.len(), "session")
    );
    let sessions = adopted.into_iter().map(|adopted| {
        let session = &state.sessions[adopted.index];
        InheritedSession {
            descriptors: descriptors[adopted.index].take().expect("asked for"),
            reached: RingPositions {
                submission_head: session.submission_head,
                completion_tail: session.completion_tail,
            },
            adopted,
        }
    });
    let inherited = InheritedSessions {
        claim: found.claim,
        sessions: sessions.collect(),
    };
    (Some(inherited), names)
}
