//! How much memory messages may take: one kind of call is large, all others are small, and a user has few large ones at a
//! time. Without this, connections times calls times the largest message would be more memory than a machine has.
//!
//! A user's connections x calls x [`SMALL_BYTES_MAX`] = 128 MiB, and [`LARGE_A_USER`] x 64 MiB besides.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use offload_api::proto::offload_server::OffloadServer;
use offload_api::{BLOB_BYTES_MAX, MESSAGE_BYTES_MAX};
use tokio::sync::Semaphore;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::NamedService;

use super::grpc;
use crate::core::Peer;

/// All but a definition of tiles: a commit's blob is the largest of them.
const SMALL_BYTES_MAX: usize = 4 * BLOB_BYTES_MAX;

/// Definitions of one user at a time. Others of the same user wait.
const LARGE_A_USER: usize = 2;

/// From the first byte of a definition to its answer; a process that stops in the middle must not block its user's others.
const LARGE_WAIT: Duration = Duration::from_secs(120);

/// The service behind two bounds.
#[derive(Clone, Debug)]
pub(super) struct Sizes {
    small: OffloadServer<grpc::Service>,
    large: OffloadServer<grpc::Service>,
    users: Arc<Mutex<HashMap<u32, Arc<Semaphore>>>>,
}

impl Sizes {
    pub(super) fn new(service: grpc::Service) -> Self {
        let service = Arc::new(service);
        // What we send is as large as a job's tiles are.
        let sized = |bytes_max| {
            OffloadServer::from_arc(service.clone())
                .max_decoding_message_size(bytes_max)
                .max_encoding_message_size(MESSAGE_BYTES_MAX)
        };
        Self {
            small: sized(SMALL_BYTES_MAX),
            large: sized(MESSAGE_BYTES_MAX),
            users: Arc::default(),
        }
    }

    fn gate(&self, uid: u32) -> Arc<Semaphore> {
        let mut users = self.users.lock().unwrap_or_else(|e| e.into_inner());
        users
            .entry(uid)
            .or_insert_with(|| Arc::new(Semaphore::new(LARGE_A_USER)))
            .clone()
    }
}

impl NamedService for Sizes {
    const NAME: &'static str = <OffloadServer<grpc::Service> as NamedService>::NAME;
}

impl Service<http::Request<Body>> for Sizes {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        if !request.uri().path().ends_with("/DefineTiles") {
            return self.small.call(request);
        }
        // Without a known user the call itself refuses.
        let uid = request.extensions().get::<Peer>().map_or(0, |p| p.uid);
        let gate = self.gate(uid);
        let mut large = self.large.clone();
        Box::pin(async move {
            let _place = gate.acquire_owned().await.expect("never closed");
            match tokio::time::timeout(LARGE_WAIT, large.call(request)).await {
                Ok(answer) => answer,
                Err(_) => {
                    let what = format!("a definition took more than {} s", LARGE_WAIT.as_secs());
                    Ok(tonic::Status::deadline_exceeded(what).into_http())
                }
            }
        })
    }
}
