//! A rank's collective calls. May use `unsafe`: Gloo gets pointers into buffers that a [`Pending`] then owns.
#![allow(unsafe_code)]

use std::sync::Arc;

use tch::Kind;

use super::link::Link;
use super::pending::{Memory, Pending};
use crate::{HostBuffer, TorchError};
use kernels::reduce::GradType;
use training_ranks::{CollectiveError, Rendezvous, Timeouts, World};

/// Largest broadcast, so that a wrong length is refused before memory is allocated for it.
const BROADCAST_BYTES_MAX: u64 = 1 << 30;

/// This rank's connection with all others.
///
/// All ranks make the same calls in the same order; within a rank that is the order of the calls that start them. After
/// the first error every call returns that error. A run of one process needs no network and has no errors.
pub struct Comm {
    world: World,
    link: Option<Arc<Link>>,
}

impl Comm {
    /// Connects this rank with all others and returns when all are connected.
    ///
    /// # Errors
    /// A directory or address that cannot be used; missing or dead ranks, by number; an error of torch or Gloo.
    pub fn connect(
        world: World,
        at: &Rendezvous,
        timeouts: Timeouts,
    ) -> Result<Comm, CollectiveError> {
        let link = match at {
            Rendezvous::Alone => {
                assert_eq!(world.ranks, 1, "several processes need a place to meet");
                None
            }
            at => Some(Arc::new(Link::open(world, at, timeouts)?)),
        };
        Ok(Comm { world, link })
    }

    /// Connects the same ranks once more, for a thread whose calls run beside those of this connection. All ranks must call
    /// it. Both connections share heartbeats and notice the same dead ranks; only this one tells others how the rank ends.
    ///
    /// # Errors
    /// A rank is gone; an error of torch or Gloo.
    pub fn connect_side(&self) -> Result<Comm, CollectiveError> {
        self.side(self.world, "side")
    }

    /// Connects the ranks of this rank's node in a group of their own, in which they are numbered from 0. All ranks of the
    /// run must call it; otherwise like [`Comm::connect_side`].
    ///
    /// # Errors
    /// A rank is gone; an error of torch or Gloo.
    pub fn connect_node(&self) -> Result<Comm, CollectiveError> {
        let first = self.world.rank - self.world.local_rank;
        self.side(self.world.of_node(), &format!("node{first}"))
    }

    /// Connects each `count` neighbouring ranks in a group of their own, in which they are numbered from 0. All ranks of the run
    /// must call it; otherwise like [`Comm::connect_side`].
    ///
    /// Panics if the number of ranks is not a multiple of `count`.
    ///
    /// # Errors
    /// A rank is gone; an error of torch or Gloo.
    pub fn connect_neighbours(&self, count: u32) -> Result<Comm, CollectiveError> {
        let world = self.world.of_neighbours(count);
        let first = self.world.rank - world.rank;
        self.side(world, &format!("neighbours{first}"))
    }

    /// Connects the first ranks of `nodes` nodes in a group of their own, in which they are numbered like their nodes; this rank is the
    /// first one of `node`. All of them must call it, and no others; otherwise like [`Comm::connect_side`].
    ///
    /// # Errors
    /// A rank is gone; an error of torch or Gloo.
    pub fn connect_first_ranks(&self, node: u32, nodes: u32) -> Result<Comm, CollectiveError> {
        let world = World {
            rank: node,
            ranks: nodes,
            local_rank: 0,
            local_ranks: 1,
        };
        self.side(world, "first-ranks")
    }

    /// Connects the ranks of `world` in the group called `name`.
    fn side(&self, world: World, name: &str) -> Result<Comm, CollectiveError> {
        let link = self.link.as_ref().filter(|_| world.ranks > 1);
        let link = link.map(|link| link.open_side(world, name));
        Ok(Comm {
            world,
            link: link.transpose()?.map(Arc::new),
        })
    }

    /// The connection of a run with one process.
    pub fn alone() -> Comm {
        Comm {
            world: World::ALONE,
            link: None,
        }
    }

    /// This rank and the number of ranks.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// Starts filling the first `elems` elements of `buffer` with every rank's shard, in rank order; this rank's own
    /// shard is already in place.
    ///
    /// Panics if `elems` is not one whole shard per rank, or a view of the buffer is alive.
    ///
    /// # Errors
    /// The first failure of this connection. The buffer is lost.
    pub fn all_gather_start(
        &self,
        mut buffer: HostBuffer,
        elems: usize,
    ) -> Result<Pending, CollectiveError> {
        let bytes = self.checked_bytes(&buffer, elems);
        let Some(link) = self.link.as_ref().filter(|_| bytes > 0) else {
            return Ok(Pending::done(buffer));
        };
        let memory = buffer.bytes_mut().as_mut_ptr();
        let shard_bytes = bytes / self.world.ranks as usize;
        let name = format!("an all-gather of {bytes} bytes");
        let started = link.start(name, |group| {
            // SAFETY: `memory` has `bytes` = ranks x shard_bytes bytes (checked_bytes). The buffer goes to the Pending
            // below, which neither touches nor frees it before the operation has ended, and leaks it when that cannot
            // be known. If starting fails, Gloo does not use it.
            unsafe { group.all_gather(memory, shard_bytes) }
        })?;
        Ok(Pending::started(
            Arc::clone(link),
            started,
            Memory::Whole(buffer),
        ))
    }

    /// Starts replacing this rank's shard of the first `elems` elements of `buffer` by the sum of all ranks' values
    /// there, added in fp32 in rank order and rounded once. The other shards are unchanged.
    ///
    /// Panics if `elems` is not one whole shard per rank, a view of the buffer is alive, or the buffer's elements are
    /// not of `grad_type`.
    ///
    /// # Errors
    /// The first failure of this connection; out of memory. The buffer is lost.
    pub fn reduce_scatter_start(
        &self,
        mut buffer: HostBuffer,
        elems: usize,
        grad_type: GradType,
    ) -> Result<Pending, CollectiveError> {
        let bytes = self.checked_bytes(&buffer, elems);
        assert_eq!(
            buffer.elem_bytes(),
            grad_type.elem_bytes(),
            "the buffer holds {grad_type:?}"
        );
        let Some(link) = self.link.as_ref().filter(|_| bytes > 0) else {
            return Ok(Pending::done(buffer));
        };
        let name = format!("a reduce-scatter of {bytes} bytes");
        let mut scratch = match link.take_scratch(bytes) {
            Some(scratch) => scratch,
            None => new_buffer(bytes, &name)?,
        };
        let from = buffer.bytes_mut().as_mut_ptr();
        let to = scratch.bytes_mut().as_mut_ptr();
        let started = link.start(name, |group| {
            // SAFETY: both have at least `bytes` bytes (checked_bytes; requested above), a multiple of the ranks, in
            // separate buffers, which go to the Pending below as in all_gather_start.
            unsafe { group.all_to_all(from, to, bytes) }
        })?;
        Ok(Pending::started(
            Arc::clone(link),
            started,
            Memory::Parts {
                buffer,
                scratch,
                bytes,
                grad_type,
            },
        ))
    }

    /// Sends part r of `buffer` to rank r, and returns a buffer whose part r is what rank r has sent here.
    ///
    /// Panics if the buffer is not one part of the same length for each rank, or a view of it is alive.
    ///
    /// # Errors
    /// The first failure of this connection; out of memory. The buffer is lost.
    pub fn all_to_all(&self, mut buffer: HostBuffer) -> Result<HostBuffer, CollectiveError> {
        let elems = buffer.elems();
        let bytes = self.checked_bytes(&buffer, elems);
        let Some(link) = self.link.as_ref().filter(|_| bytes > 0) else {
            return Ok(buffer);
        };
        let name = format!("an all-to-all of {bytes} bytes");
        let mut received = buffer.new_alike().map_err(|error| failed(&name, error))?;
        let from = buffer.bytes_mut().as_mut_ptr();
        let to = received.bytes_mut().as_mut_ptr();
        let started = link.start(name, |group| {
            // SAFETY: both have `bytes` bytes, a multiple of the ranks (checked_bytes), in separate buffers, which go to the
            // Pending below as in all_gather_start.
            unsafe { group.all_to_all(from, to, bytes) }
        })?;
        let memory = Memory::Received {
            _sent: buffer,
            received,
        };
        Pending::started(Arc::clone(link), started, memory).wait()
    }

    /// Replaces each value by its sum over the ranks, added in rank order: the same bits on every rank.
    ///
    /// # Errors
    /// The first failure of this connection; out of memory.
    pub fn all_reduce_sum_f64(&self, values: &mut [f64]) -> Result<(), CollectiveError> {
        let own: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let all = self.all_gather_bytes(&own)?;
        for (i, value) in values.iter_mut().enumerate() {
            let of_rank = |bytes: &Vec<u8>| {
                f64::from_le_bytes(bytes[i * 8..i * 8 + 8].try_into().expect("eight bytes"))
            };
            *value = all
                .iter()
                .map(of_rank)
                .reduce(|sum, x| sum + x)
                .expect("at least one rank");
        }
        Ok(())
    }

    /// Returns every rank's bytes in rank order. All ranks pass the same number of bytes.
    ///
    /// # Errors
    /// The first failure of this connection; out of memory.
    pub fn all_gather_bytes(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        if self.link.is_none() || own.is_empty() {
            return Ok(vec![own.to_vec(); self.world.ranks as usize]);
        }
        let bytes = own.len() * self.world.ranks as usize;
        let mut buffer = new_buffer(bytes, "gathering values")?;
        let place = self.world.rank as usize * own.len();
        buffer.bytes_mut()[place..place + own.len()].copy_from_slice(own);
        let mut buffer = self.all_gather_start(buffer, bytes)?.wait()?;
        let parts = buffer.bytes_mut().chunks_exact(own.len());
        Ok(parts.map(<[u8]>::to_vec).collect())
    }

    /// Returns rank `root`'s bytes on every rank; those of other ranks are ignored.
    ///
    /// Panics if there are more than 1 GiB.
    ///
    /// # Errors
    /// The first failure of this connection; out of memory.
    pub fn broadcast_bytes(&self, root: u32, bytes: Vec<u8>) -> Result<Vec<u8>, CollectiveError> {
        let Some(link) = &self.link else {
            return Ok(bytes);
        };
        let lengths = self.all_gather_bytes(&(bytes.len() as u64).to_le_bytes())?;
        let length = &lengths[root as usize];
        let length = u64::from_le_bytes(length[..].try_into().expect("eight bytes"));
        assert!(
            length <= BROADCAST_BYTES_MAX,
            "a broadcast of {length} bytes"
        );
        let count = length as usize;
        if count == 0 {
            return Ok(Vec::new());
        }
        let name = format!("a broadcast of {count} bytes from rank {root}");
        let mut buffer = new_buffer(count, &name)?;
        if root == self.world.rank {
            buffer.bytes_mut().copy_from_slice(&bytes);
        }
        let memory = buffer.bytes_mut().as_mut_ptr();
        let started = link.start(name, |group| {
            // SAFETY: `memory` has `count` bytes in a buffer that goes to the Pending below, as in all_gather_start.
            unsafe { group.broadcast(memory, count, root) }
        })?;
        let pending = Pending::started(Arc::clone(link), started, Memory::Whole(buffer));
        Ok(pending.wait()?.bytes_mut().to_vec())
    }

    /// Waits until every rank has called it.
    ///
    /// # Errors
    /// The first failure of this connection.
    pub fn barrier(&self) -> Result<(), CollectiveError> {
        self.all_gather_bytes(&[0]).map(|_| ())
    }

    /// Checks that every rank has the same `value`.
    ///
    /// # Errors
    /// A rank whose value differs from rank 0's; the first failure of this connection.
    pub fn same_everywhere(&self, what: &str, value: &str) -> Result<(), CollectiveError> {
        let lengths = self.all_gather_bytes(&(value.len() as u64).to_le_bytes())?;
        let lengths = lengths
            .iter()
            .map(|length| u64::from_le_bytes(length[..].try_into().expect("eight bytes")) as usize);
        let lengths: Vec<usize> = lengths.collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let mut own = value.as_bytes().to_vec();
        own.resize(longest, 0);
        let values = self.all_gather_bytes(&own)?;
        let shown = |rank: usize| String::from_utf8_lossy(&values[rank][..lengths[rank]]);
        for rank in 1..values.len() {
            if shown(rank) != shown(0) {
                return Err(CollectiveError::Disagree {
                    what: what.to_owned(),
                    rank: rank as u32,
                    expected: shown(0).into_owned(),
                    found: shown(rank).into_owned(),
                });
            }
        }
        Ok(())
    }

    /// The error of a rank that is gone, if one is: for a thread that checks while another waits for something other
    /// than an operation of this connection.
    pub fn gone(&self) -> Option<CollectiveError> {
        self.link.as_ref()?.gone("looking after the ranks")
    }

    /// Tells the other ranks that this rank gives up, and why: their calls return that within seconds.
    pub fn give_up(&self, reason: &str) {
        if let Some(link) = &self.link {
            link.end(reason);
        }
    }

    /// Closes the connection together with all other ranks.
    ///
    /// # Errors
    /// The first failure of this connection.
    pub fn close(self) -> Result<(), CollectiveError> {
        self.barrier()?;
        self.give_up("it had finished");
        Ok(())
    }

    pub(super) fn timeouts(&self) -> Timeouts {
        let link = self.link.as_ref();
        link.map_or_else(Timeouts::default, |link| link.timeouts)
    }

    pub(super) fn link(&self) -> Option<Arc<Link>> {
        self.link.clone()
    }

    /// Bytes of the first `elems` elements.
    fn checked_bytes(&self, buffer: &HostBuffer, elems: usize) -> usize {
        assert!(
            elems <= buffer.elems(),
            "{elems} elements in a buffer of {}",
            buffer.elems()
        );
        assert!(
            elems.is_multiple_of(self.world.ranks as usize),
            "{elems} elements are no whole shard for each of {} ranks",
            self.world.ranks
        );
        elems * buffer.elem_bytes()
    }
}

fn new_buffer(bytes: usize, op: &str) -> Result<HostBuffer, CollectiveError> {
    HostBuffer::zeros(Kind::Uint8, bytes).map_err(|error| failed(op, error))
}

fn failed(op: &str, error: TorchError) -> CollectiveError {
    CollectiveError::Backend {
        op: op.to_owned(),
        message: error.to_string(),
    }
}
