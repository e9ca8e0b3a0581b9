//! Division of attention by cuDNN into calls whose workspace is bounded: sizes only, so that a plan can ask.
//!
//! With sums in a fixed order, a call writes 2 bytes for each pair of query and key to its workspace. So sequences and heads are
//! computed in *chunks*, which share nothing, and long sequences in *blocks* of queries and keys, whose gradients are added
//! in their order. Blocks depend on the shape alone, so results do too; chunks change no bit.
//!
//! ```text
//!   blocks of a sequence (1 causal, 2 all keys)          with a window
//!        keys ─▶                                             keys ─▶
//!     ┌───┬───┬───┐                                       ┌───┐
//!     │ 1 │   │   │  queries                              │ 1 ├───┐
//!     ├───┼───┼───┤    │                                  │   │ 1 ├───┐
//!     │ 2 │ 1 │   │    ▼                                  └───┤   │ 1 │
//!     ├───┼───┼───┤                                           └───┤   │
//!     │ 2 │ 2 │ 1 │                                               └───┘
//!     └───┴───┴───┘
//! ```

/// Keys that a query sees. Query `i` of a call belongs to the same token as key `i`, unless all keys are seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mask {
    /// All of them.
    None,
    /// Those up to its own.
    Causal,
    /// As many of those as stated, its own included.
    Window(i64),
}

/// Largest head that cuDNN's kernels support; the size must also be a multiple of [`HEAD_DIM_UNIT`].
const HEAD_DIM_MAX: usize = 256;
const HEAD_DIM_UNIT: usize = 8;

/// Returns whether cuDNN's kernels support heads of this size.
pub fn cudnn_supports(head_dim: usize) -> bool {
    head_dim.is_multiple_of(HEAD_DIM_UNIT) && (1..=HEAD_DIM_MAX).contains(&head_dim)
}

/// Most bytes of a call's workspace for pairs. On an H200, 8 x 16 x 2048 x 128 reached 294, 348 and 378 TFLOPS with 1/4, 1/2 and
/// 1 GiB, and 4 x 32 x 4096 x 128 reached 387 and 425 with 1 and 2 GiB.
const WORKSPACE_BYTES_MAX: i64 = 2 << 30;

/// Most queries and keys of a block. On an H200, 131,072 tokens reached 386, 440 and 453 TFLOPS with 4,096, 8,192 and 16,384.
const BLOCK_TOKENS_MAX: i64 = 16384;

/// Fewest keys of a block with a window; fewer would make matrix products too small.
const WINDOW_KEYS_MIN: i64 = 1024;

/// Blocks are multiples of it: tiles of the kernels.
const BLOCK_UNIT: i64 = 128;

/// Bytes of a pair of query and key in the workspace.
const PAIR_BYTES: i64 = 2;

/// Sizes of a batch's attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionSizes {
    /// Sequences.
    pub batch: i64,
    /// Query heads.
    pub heads: i64,
    /// Key and value heads, a divisor of `heads`.
    pub kv_heads: i64,
    /// Tokens of a sequence.
    pub tokens: i64,
    /// Elements of a head.
    pub head_dim: i64,
    /// Number of tokens that a query sees, its own included; `None`: all.
    pub window: Option<i64>,
}

impl AttentionSizes {
    /// Query heads that use the same key and value head.
    pub fn share(&self) -> i64 {
        self.heads / self.kv_heads
    }
}

/// Queries and keys of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// First query.
    pub query: i64,
    /// Number of queries.
    pub queries: i64,
    /// First key.
    pub key: i64,
    /// Number of keys.
    pub keys: i64,
    /// Which of the keys a query sees.
    pub mask: Mask,
}

impl Block {
    /// The whole sequence.
    pub fn all(sizes: &AttentionSizes) -> Self {
        Self {
            query: 0,
            queries: sizes.tokens,
            key: 0,
            keys: sizes.tokens,
            mask: match sizes.window {
                Some(tokens) => Mask::Window(tokens),
                None => Mask::Causal,
            },
        }
    }
}

/// Blocks of a sequence, in the order of their addition: all pairs of a query and a key that it sees, each once.
pub fn blocks(sizes: &AttentionSizes) -> Vec<Block> {
    let (tokens, window) = (sizes.tokens, sizes.window);
    let even = |most: i64| {
        let parts = (tokens as u64).div_ceil(most as u64) as i64;
        round_up((tokens as u64).div_ceil(parts as u64) as i64, BLOCK_UNIT)
    };
    // As few as leave room for the heads that stay together.
    let mut most = BLOCK_TOKENS_MAX;
    while most > BLOCK_UNIT && sizes.share() * most * most * PAIR_BYTES > WORKSPACE_BYTES_MAX {
        most /= 2;
    }
    if let Some(window) = window {
        most = round_up(window, BLOCK_UNIT).clamp(WINDOW_KEYS_MIN.min(most), most);
    }
    let size = even(most);
    let starts = || (0..tokens).step_by(size as usize);
    let mut blocks = Vec::new();
    for key in starts() {
        let keys = size.min(tokens - key);
        let block = |query: i64, queries: i64, mask| Block {
            query,
            queries,
            key,
            keys,
            mask,
        };
        match window {
            Some(window) => {
                // The last query that sees the last key.
                let queries = (keys + window - 1).min(tokens - key);
                blocks.push(block(key, queries, Mask::Window(window)));
            }
            None => {
                blocks.push(block(key, keys, Mask::Causal));
                let below = starts().filter(|&query| query > key);
                blocks.extend(below.map(|query| {
                    let queries = size.min(tokens - query);
                    block(query, queries, Mask::None)
                }));
            }
        }
    }
    blocks
}

fn round_up(x: i64, unit: i64) -> i64 {
    (x as u64).next_multiple_of(unit as u64) as i64
}

/// Sequences and heads of one call: whole sequences, or some heads of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// First sequence.
    pub sequence: i64,
    /// Number of sequences.
    pub batch: i64,
    /// First query head.
    pub head: i64,
    /// Number of query heads.
    pub heads: i64,
}

impl Chunk {
    /// Everything.
    pub fn all(sizes: &AttentionSizes) -> Self {
        Self {
            sequence: 0,
            batch: sizes.batch,
            head: 0,
            heads: sizes.heads,
        }
    }
}

/// Chunks of a batch: all sequences and heads, each once.
pub fn chunks(sizes: &AttentionSizes, blocks: &[Block]) -> Vec<Chunk> {
    let share = sizes.share();
    let pairs = blocks.iter().map(|block| block.queries * block.keys);
    let most_pairs = pairs.max().unwrap_or(1).max(1);
    let heads_max = (WORKSPACE_BYTES_MAX / (most_pairs * PAIR_BYTES)).max(share);
    let mut chunks = Vec::new();
    if heads_max >= sizes.heads && blocks.len() == 1 {
        let sequences = heads_max / sizes.heads;
        for sequence in (0..sizes.batch).step_by(sequences as usize) {
            chunks.push(Chunk {
                sequence,
                batch: sequences.min(sizes.batch - sequence),
                head: 0,
                heads: sizes.heads,
            });
        }
        return chunks;
    }
    let heads = (heads_max / share * share).min(sizes.heads);
    for sequence in 0..sizes.batch {
        for head in (0..sizes.heads).step_by(heads as usize) {
            chunks.push(Chunk {
                sequence,
                batch: 1,
                head,
                heads: heads.min(sizes.heads - head),
            });
        }
    }
    chunks
}

/// Longest document that is computed together with others: a longer one fills a GPU alone.
const GROUPED_TOKENS_MAX: i64 = 4096;

/// Fewest tokens to which the length of documents of a group is rounded up.
const GROUPED_TOKENS_MIN: i64 = BLOCK_UNIT;

/// Tokens of a group if all its documents had the largest length: enough to fill a GPU.
const GROUP_TOKENS: i64 = 32768;

/// Documents that one call computes together, as a batch of sequences of up to `tokens` tokens. Lengths and numbers of documents
/// are rounded up, so that a run needs few plans whatever its documents are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Most tokens of a document.
    pub tokens: i64,
    /// First token of each document. Missing ones are filled up with empty documents.
    pub starts: Vec<i64>,
    /// Tokens of each document.
    pub lengths: Vec<i64>,
}

/// Divides documents of these lengths, one after the other, into groups and, in the second list, long ones that are computed
/// alone: first token and length.
pub fn groups(lengths: &[i64], heads: i64) -> (Vec<Group>, Vec<(i64, i64)>) {
    let (mut groups, mut alone) = (Vec::<Group>::new(), Vec::new());
    let mut start = 0;
    for &length in lengths {
        let tokens = (length as u64).next_power_of_two() as i64;
        let tokens = tokens.max(GROUPED_TOKENS_MIN);
        let by_memory = WORKSPACE_BYTES_MAX / (heads * tokens * tokens * PAIR_BYTES);
        let most = by_memory.min(GROUP_TOKENS / tokens) as usize;
        if tokens > GROUPED_TOKENS_MAX || most == 0 {
            alone.push((start, length));
            start += length;
            continue;
        }
        let open = |group: &&mut Group| group.tokens == tokens && group.lengths.len() < most;
        match groups.iter_mut().find(open) {
            Some(group) => {
                group.starts.push(start);
                group.lengths.push(length);
            }
            None => groups.push(Group {
                tokens,
                starts: vec![start],
                lengths: vec![length],
            }),
        }
        start += length;
    }
    for group in &mut groups {
        // Half of the largest number, a quarter and so on: few plans, and at most half of a call is empty.
        let mut count = (GROUP_TOKENS / group.tokens) as usize;
        let by_memory = WORKSPACE_BYTES_MAX / (heads * group.tokens * group.tokens * PAIR_BYTES);
        count = count.min(by_memory as usize);
        while count.div_ceil(2) >= group.lengths.len() && count > 1 {
            count = count.div_ceil(2);
        }
        group.starts.resize(count, 0);
        group.lengths.resize(count, 0);
    }
    (groups, alone)
}

/// Most bytes that a backward pass takes at a time besides its inputs and outputs; with `deterministic`, sums have a fixed order.
pub fn backward_workspace_bytes(sizes: &AttentionSizes, deterministic: bool) -> u64 {
    const WIDE_BYTES: i64 = 4;
    const ELEM_BYTES: i64 = 2;
    let share = sizes.share();
    let (blocks, chunks) = match deterministic {
        true => {
            let blocks = blocks(sizes);
            let chunks = chunks(sizes, &blocks);
            (blocks, chunks)
        }
        false => (vec![Block::all(sizes)], vec![Chunk::all(sizes)]),
    };
    let of_block = |chunk: &Chunk, block: &Block| {
        let rows = chunk.batch * chunk.heads;
        // The kernels' tiles are written whole. Without a fixed order, the query's gradient is summed in fp32 instead.
        let tiles = |tokens: i64| round_up(tokens, BLOCK_UNIT);
        let pairs = match deterministic {
            true => rows * tiles(block.queries) * tiles(block.keys) * PAIR_BYTES,
            false => rows * block.queries * sizes.head_dim * WIDE_BYTES,
        };
        // Gradients of key and value by query head before they are added.
        let by_head = match share {
            1 => 0,
            _ => 2 * rows * block.keys * sizes.head_dim * ELEM_BYTES,
        };
        let stats = 2 * rows * block.queries * WIDE_BYTES;
        pairs + by_head + stats
    };
    let of_sums = |chunk: &Chunk| {
        if blocks.len() == 1 {
            return 0;
        }
        let elems = chunk.batch * (chunk.heads + 2 * chunk.heads / share) * sizes.head_dim;
        let longest = blocks.iter().map(|block| block.queries).max().unwrap_or(0);
        elems * (sizes.tokens * WIDE_BYTES + longest * ELEM_BYTES)
    };
    let of_chunk = |chunk: &Chunk| {
        let most = blocks.iter().map(|block| of_block(chunk, block)).max();
        most.unwrap_or(0) + of_sums(chunk)
    };
    let most = chunks.iter().map(of_chunk).max();
    most.unwrap_or(0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(tokens: i64, heads: [i64; 2], window: Option<i64>) -> AttentionSizes {
        AttentionSizes {
            batch: 3,
            heads: heads[0],
            kv_heads: heads[1],
            tokens,
            head_dim: 128,
            window,
        }
    }

    #[test]
    fn every_document_is_in_one_group_or_alone() {
        let lengths: Vec<i64> = (0..900).map(|i| 1 + (i * i * 37 + i * 11) % 700).collect();
        let lengths = [&lengths[..], &[9000, 4096, 1, 128, 129, 20_000, 2500]].concat();
        for heads in [1, 16, 128] {
            let (groups, alone) = groups(&lengths, heads);
            let mut found = alone.clone();
            for group in &groups {
                assert_eq!(group.starts.len(), group.lengths.len());
                let count = group.lengths.len() as i64;
                assert!(group.lengths.iter().all(|&length| length <= group.tokens));
                let pairs = heads * count * group.tokens * group.tokens;
                assert!(
                    pairs * PAIR_BYTES <= WORKSPACE_BYTES_MAX,
                    "{heads}: {group:?}"
                );
                let documents = group
                    .starts
                    .iter()
                    .copied()
                    .zip(group.lengths.iter().copied());
                found.extend(documents.filter(|(_, length)| *length > 0));
            }
            found.sort_unstable();
            let mut start = 0;
            let wanted = lengths.iter().map(|&length| {
                start += length;
                (start - length, length)
            });
            assert_eq!(found, wanted.collect::<Vec<_>>(), "{heads} heads");
            // Shapes repeat, so that plans do.
            let mut shapes: Vec<_> = groups.iter().map(|g| (g.tokens, g.lengths.len())).collect();
            shapes.sort_unstable();
            shapes.dedup();
            assert!(shapes.len() <= 12, "{heads} heads: {shapes:?}");
        }
        assert!(groups(&[20_000], 16).0.is_empty());
    }

    /// Counts how often each pair of query and key is computed.
    fn counts(tokens: i64, blocks: &[Block]) -> Vec<u8> {
        let mut counts = vec![0u8; (tokens * tokens) as usize];
        for block in blocks {
            for i in 0..block.queries {
                for j in 0..block.keys {
                    let seen = match block.mask {
                        Mask::None => true,
                        Mask::Causal => j <= i,
                        Mask::Window(tokens) => j <= i && i - j < tokens,
                    };
                    let at = (block.query + i) * tokens + block.key + j;
                    counts[at as usize] += u8::from(seen);
                }
            }
        }
        counts
    }

    #[test]
    fn every_visible_pair_is_in_one_block() {
        // With few heads a block is as large as it gets, so groups of heads make them small.
        for (tokens, share, window) in [
            (100, 1, None),
            (700, 4096, None),
            (900, 1, Some(100)),
            (2500, 1, Some(100)),
            (2500, 16384, Some(1)),
            (1300, 16384, Some(700)),
        ] {
            let sizes = sizes(tokens, [share, 1], window);
            let blocks = blocks(&sizes);
            let window = window.unwrap_or(tokens);
            let found = counts(tokens, &blocks);
            for i in 0..tokens {
                for j in 0..tokens {
                    let wanted = u8::from(j <= i && i - j < window);
                    let count = found[(i * tokens + j) as usize];
                    assert_eq!(count, wanted, "{sizes:?}: query {i}, key {j}");
                }
            }
        }
        assert_eq!(blocks(&sizes(2048, [16, 16], None)).len(), 1);
        assert_eq!(blocks(&sizes(131_072, [16, 16], None)).len(), 8 * 9 / 2);
    }

    #[test]
    fn every_head_is_in_one_chunk_and_the_workspace_is_bounded() {
        for (tokens, heads, window) in [
            (2048, [16, 16], None),
            (2048, [16, 4], None),
            (4096, [32, 8], None),
            (8192, [12, 3], None),
            (32_768, [16, 16], None),
            (131_072, [16, 2], None),
            (131_072, [64, 1], None),
            (131_072, [16, 16], Some(4096)),
        ] {
            let sizes = sizes(tokens, heads, window);
            let blocks = blocks(&sizes);
            let mut found = vec![0; (sizes.batch * sizes.heads) as usize];
            for chunk in chunks(&sizes, &blocks) {
                assert_eq!(chunk.head % sizes.share(), 0);
                assert_eq!(chunk.heads % sizes.share(), 0);
                for sequence in chunk.sequence..chunk.sequence + chunk.batch {
                    for head in chunk.head..chunk.head + chunk.heads {
                        found[(sequence * sizes.heads + head) as usize] += 1;
                    }
                }
            }
            assert!(
                found.iter().all(|&count| count == 1),
                "{sizes:?}: {found:?}"
            );
            let bytes = backward_workspace_bytes(&sizes, true);
            assert!(bytes < 8 << 30, "{sizes:?}: {bytes}");
        }
    }
}
