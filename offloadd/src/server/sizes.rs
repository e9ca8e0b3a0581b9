//! Limits the memory of messages: one kind of call is large, all others are small, and a user may have few large ones at a time.
//! Without this, connections times calls times the largest message would exceed a machine's memory.
//!
//! Requests: a user's connections x calls x [`SMALL_BYTES_MAX`] = 128 MiB, plus [`LARGE_A_USER`] x 64 MiB.
//!
//! Answers: a user has at most [`LISTS_A_USER`] unread answers whose size grows with the number of jobs (1 MiB at 1,024 jobs). All
//! others have a few kilobytes, and a job's record is sent in messages of 64 KiB. A connection whose peer does not read is closed
//! (`peer`).

use std::collections::HashMap;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::body::{Frame, SizeHint};
use offload_api::proto::offload_server::OffloadServer;
use offload_api::{BLOB_BYTES_MAX, MESSAGE_BYTES_MAX};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::NamedService;

use super::grpc;
use super::peer::{Caller, Pending, UnreadAnswer};

/// Limit of all requests except definitions of tiles; the largest is a commit with its blob.
const SMALL_BYTES_MAX: usize = 4 * BLOB_BYTES_MAX;

/// Concurrent definitions per user; further ones wait.
const LARGE_A_USER: usize = 2;

/// Time limit of a definition, so that a process that stops halfway does not block its user's other processes.
const LARGE_WAIT: Duration = Duration::from_secs(120);

/// Calls whose answers grow with the contents of the store.
const LISTS: [&str; 4] = ["/DescribeJob", "/Inspect", "/Metrics", "/ListJobs"];

/// Unread answers to these per user; further calls wait.
const LISTS_A_USER: usize = 16;

/// The service with two limits of request size.
#[derive(Clone, Debug)]
pub(super) struct Sizes {
    small: OffloadServer<grpc::Service>,
    large: OffloadServer<grpc::Service>,
    users: Arc<Mutex<HashMap<u32, Gates>>>,
}

/// Semaphores of one user.
#[derive(Clone, Debug)]
struct Gates {
    definitions: Arc<Semaphore>,
    lists: Arc<Semaphore>,
}

impl Sizes {
    pub(super) fn new(service: grpc::Service) -> Self {
        let service = Arc::new(service);
        // Answers may be as large as a definition of tiles.
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

    fn gates(&self, uid: u32) -> Gates {
        let mut users = self.users.lock().unwrap_or_else(|e| e.into_inner());
        let new = || Gates {
            definitions: Arc::new(Semaphore::new(LARGE_A_USER)),
            lists: Arc::new(Semaphore::new(LISTS_A_USER)),
        };
        users.entry(uid).or_insert_with(new).clone()
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

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        // The service refuses a call of an unknown user.
        let Some(Caller { peer, pending }) = request.extensions().get::<Caller>().cloned() else {
            return self.small.call(request);
        };
        request.extensions_mut().insert(peer);
        pending.called();
        let gates = self.gates(peer.uid);
        let path = request.uri().path();
        let answering: Self::Future = if path.ends_with("/DefineTiles") {
            let mut large = self.large.clone();
            Box::pin(async move {
                let _place = (gates.definitions.acquire_owned().await).expect("never closed");
                match tokio::time::timeout(LARGE_WAIT, large.call(request)).await {
                    Ok(answer) => answer,
                    Err(_) => {
                        let what = format!(
                            "receiving the definition of tiles took more than {} s",
                            LARGE_WAIT.as_secs()
                        );
                        Ok(tonic::Status::deadline_exceeded(what).into_http())
                    }
                }
            })
        } else if LISTS.iter().any(|list| path.ends_with(list)) {
            let mut small = self.small.clone();
            Box::pin(async move {
                let place = gates.lists.acquire_owned().await.expect("never closed");
                let answer = small.call(request).await?;
                Ok(answer.map(|body| AnswerBody::wrap(body, &pending, Some(place))))
            })
        } else {
            let answering = self.small.call(request);
            Box::pin(async move {
                let answer = answering.await?;
                Ok(answer.map(|body| AnswerBody::wrap(body, &pending, None)))
            })
        };
        answering
    }
}

/// Body of an answer. Tracks whether the peer is expected to read, and holds its permit until the peer has read it or is gone.
struct AnswerBody {
    body: Body,
    untaken: UnreadAnswer,
    _place: Option<OwnedSemaphorePermit>,
}

impl AnswerBody {
    fn wrap(body: Body, pending: &Arc<Pending>, place: Option<OwnedSemaphorePermit>) -> Body {
        Body::new(Self {
            body,
            untaken: UnreadAnswer::new(pending),
            _place: place,
        })
    }
}

/// The transport polls for a frame when the peer's window has space.
impl hyper::body::Body for AnswerBody {
    type Data = <Body as hyper::body::Body>::Data;
    type Error = <Body as hyper::body::Body>::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        match &frame {
            Poll::Ready(_) => self.untaken.peer_has_turn(),
            Poll::Pending => self.untaken.we_have_turn(),
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
