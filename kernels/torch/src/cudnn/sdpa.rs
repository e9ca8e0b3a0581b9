//! Graphs of causal attention: forward, and backward with or without sums in a fixed order.
//!
//! ```text
//!   forward    q k^T, scaled, masked ─▶ softmax ─▶ p v = o
//!                                          └─▶ stats = max + ln(sum of exponentials), for each query
//!   backward   p = exp(q k^T scaled, - stats, masked)     dv = p^T do
//!              ds = p (do v^T - sum of do o) scaled       dk = ds^T q      dq = ds k
//! ```
//!
//! cuDNN recognises these patterns and computes each with one fused kernel. `dq` has contributions of all keys. With fixed order,
//! `ds` is written to the workspace (2 bytes for each pair of query and key) and multiplied by `k` afterwards; otherwise
//! blocks of keys add to an fp32 sum in the order in which they finish.

use kernels::attention::Mask;

use super::CudnnError;
use super::graph::{CudnnType, Graph, Layout, Node, Plan, Pointwise, Reduction, Uid};
use super::library::Library9;

pub(super) const Q: Uid = 1;
pub(super) const K: Uid = 2;
pub(super) const V: Uid = 3;
pub(super) const O: Uid = 4;
pub(super) const STATS: Uid = 5;
pub(super) const DO: Uid = 6;
pub(super) const DQ: Uid = 7;
pub(super) const DK: Uid = 8;
pub(super) const DV: Uid = 9;
pub(super) const SUMS: Uid = 10;
pub(super) const DQ_SUM: Uid = 11;
pub(super) const LENGTHS: Uid = 12;
/// First elements of each document in query, key, value and output, and in the gradients of query, key and value.
pub(super) const OFFSETS: [Uid; 7] = [13, 14, 15, 16, 17, 18, 19];

/// One call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Call {
    pub(super) number: CudnnType,
    pub(super) batch: i64,
    pub(super) heads: i64,
    pub(super) kv_heads: i64,
    pub(super) queries: i64,
    pub(super) keys: i64,
    pub(super) head_dim: i64,
    pub(super) mask: Mask,
    /// Each entry of the batch is a document with its own first element and its own length, up to `queries` and `keys`.
    pub(super) documents: bool,
    /// Strides of batch, head and token of query, key and value.
    pub(super) inputs: [[i64; 3]; 3],
    /// The same of the output and its gradient.
    pub(super) output: [i64; 3],
}

/// Layouts of the gradients of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Grads {
    /// Strides of batch, head and token of the gradients of query, key and value.
    pub(super) outputs: [[i64; 3]; 3],
    /// Sums in a fixed order.
    pub(super) deterministic: bool,
}

impl Call {
    fn layout(&self, heads: i64, tokens: i64, strides: [i64; 3]) -> Layout {
        let [batch, head, token] = strides;
        Layout {
            sizes: [self.batch, heads, tokens, self.head_dim],
            strides: [batch, head, token, 1],
        }
    }

    /// Query, key and value, with the strides of these or of their gradients.
    fn layouts(&self, [query, key, value]: [[i64; 3]; 3]) -> [Layout; 3] {
        [
            self.layout(self.heads, self.queries, query),
            self.layout(self.kv_heads, self.keys, key),
            self.layout(self.kv_heads, self.keys, value),
        ]
    }

    fn output(&self) -> Layout {
        self.layout(self.heads, self.queries, self.output)
    }

    /// A tensor of this call's numbers, with the first elements of its documents.
    fn tensor(
        &self,
        g: &mut Graph,
        uid: Uid,
        layout: Layout,
        offsets: usize,
    ) -> Result<Node, CudnnError> {
        let offsets = self.offsets(g, offsets)?;
        g.tensor(uid, self.number, layout, offsets)
    }

    fn offsets(&self, g: &mut Graph, at: usize) -> Result<Option<Node>, CudnnError> {
        if !self.documents {
            return Ok(None);
        }
        let layout = Layout::packed([self.batch + 1, 1, 1, 1]);
        Ok(Some(g.tensor(
            OFFSETS[at],
            CudnnType::Int64,
            layout,
            None,
        )?))
    }

    /// Lengths of the documents.
    fn lengths(&self, g: &mut Graph) -> Result<Option<Node>, CudnnError> {
        if !self.documents {
            return Ok(None);
        }
        let layout = Layout::packed([self.batch, 1, 1, 1]);
        Ok(Some(g.tensor(LENGTHS, CudnnType::Int32, layout, None)?))
    }

    /// A number for each pair of query and key.
    fn pairs(&self) -> Layout {
        Layout::packed([self.batch, self.heads, self.queries, self.keys])
    }

    /// A number for each query.
    fn rows(&self) -> Layout {
        Layout::packed([self.batch, self.heads, self.queries, 1])
    }

    /// Hides keys by giving their scores the value of minus infinity.
    fn masked(
        &self,
        g: &mut Graph,
        scores: Node,
        lengths: Option<Node>,
    ) -> Result<Node, CudnnError> {
        let pairs = self.pairs();
        let index = |g: &mut Graph, of: Node, axis| {
            let index = g.between(CudnnType::Int32, pairs)?;
            g.index(of, axis, index)?;
            Ok::<_, CudnnError>(index)
        };
        let select = |g: &mut Graph, op, left, right, of| {
            let seen = g.between(CudnnType::Boolean, pairs)?;
            g.compare(op, left, right, seen)?;
            let hidden = g.constant(f32::NEG_INFINITY)?;
            let masked = g.between(CudnnType::Fp32, pairs)?;
            g.select(seen, of, hidden, masked)?;
            Ok::<_, CudnnError>(masked)
        };
        let mut scores = scores;
        if let Some(lengths) = lengths {
            let (row, column) = (index(g, scores, 2)?, index(g, scores, 3)?);
            let within = |g: &mut Graph, index| {
                let within = g.between(CudnnType::Boolean, pairs)?;
                g.compare(Pointwise::Less, index, lengths, within)?;
                Ok::<_, CudnnError>(within)
            };
            let (row, column) = (within(g, row)?, within(g, column)?);
            scores = select(g, Pointwise::And, row, column, scores)?;
        }
        if self.mask == Mask::None {
            return Ok(scores);
        }
        let (row, column) = (index(g, scores, 2)?, index(g, scores, 3)?);
        let causal = select(g, Pointwise::AtLeast, row, column, scores)?;
        let Mask::Window(tokens) = self.mask else {
            return Ok(causal);
        };
        // Kernels that skip hidden blocks recognise this form: column + window > row, in fp32.
        let (row, column) = (index(g, causal, 2)?, index(g, causal, 3)?);
        let tokens = g.constant(tokens as f32)?;
        let reach = g.between(CudnnType::Fp32, pairs)?;
        g.pointwise(Pointwise::Add, column, Some(tokens), reach)?;
        select(g, Pointwise::Greater, reach, row, causal)
    }

    fn scale(&self, graph: &mut Graph, x: Node) -> Result<Node, CudnnError> {
        let scale = graph.constant((1.0 / (self.head_dim as f64).sqrt()) as f32)?;
        combine(graph, Pointwise::Mul, x, scale)
    }

    /// Plans the forward pass.
    pub(super) fn forward(
        &self,
        library: &'static Library9,
        handle: usize,
    ) -> Result<Plan, CudnnError> {
        let mut graph = Graph::new(library);
        let g = &mut graph;
        let [query, key, value] = self.layouts(self.inputs);
        let query = self.tensor(g, Q, query, 0)?;
        let key = self.tensor(g, K, key.transposed(), 1)?;
        let value = self.tensor(g, V, value, 2)?;
        let output = self.tensor(g, O, self.output(), 3)?;
        let stats = g.tensor(STATS, CudnnType::Fp32, self.rows(), None)?;
        let used = self.lengths(g)?;

        let scores = g.between(CudnnType::Fp32, self.pairs())?;
        g.matmul(query, key, scores, [used, used, None])?;
        let scores = self.scale(g, scores)?;
        let scores = self.masked(g, scores, used)?;

        let max = g.between(CudnnType::Fp32, self.rows())?;
        g.reduce(Reduction::Max, scores, max)?;
        let apart = combine(g, Pointwise::Sub, scores, max)?;
        let exp = apply(g, Pointwise::Exp, apart)?;
        let sum = g.between(CudnnType::Fp32, self.rows())?;
        g.reduce(Reduction::Add, exp, sum)?;
        let log = apply(g, Pointwise::Log, sum)?;
        g.pointwise(Pointwise::Add, max, Some(log), stats)?;
        let weights = g.between(self.number, self.pairs())?;
        g.pointwise(Pointwise::Div, exp, Some(sum), weights)?;
        g.matmul(weights, value, output, [used, None, used])?;
        graph.plan(handle)
    }

    /// Plans the backward pass.
    pub(super) fn backward(
        &self,
        grads: Grads,
        library: &'static Library9,
        handle: usize,
    ) -> Result<Plan, CudnnError> {
        let mut graph = Graph::new(library);
        let g = &mut graph;
        let [query, key, value] = self.layouts(self.inputs);
        let plain_key = key;
        let query = self.tensor(g, Q, query, 0)?;
        let key_offsets = self.offsets(g, 1)?;
        let key = g.tensor(K, self.number, key.transposed(), key_offsets)?;
        let value = self.tensor(g, V, value.transposed(), 2)?;
        let output_offsets = self.offsets(g, 3)?;
        let output = g.tensor(O, self.number, self.output(), output_offsets)?;
        let grad = g.tensor(DO, self.number, self.output(), output_offsets)?;
        let stats = g.tensor(STATS, CudnnType::Fp32, self.rows(), None)?;
        let used = self.lengths(g)?;
        let [of_query, of_key, of_value] = self.layouts(grads.outputs);
        let of_query = self.tensor(g, DQ, of_query, 4)?;
        let of_key = self.tensor(g, DK, of_key, 5)?;
        let of_value = self.tensor(g, DV, of_value, 6)?;

        // The sum of do o, a number for each query.
        let product = g.between(CudnnType::Fp32, Layout::packed(self.output().sizes))?;
        g.pointwise(Pointwise::Mul, grad, Some(output), product)?;
        let sum = g.between(CudnnType::Fp32, self.rows())?;
        g.reduce(Reduction::Add, product, sum)?;
        let one = g.constant(1.0)?;
        let sums = g.tensor(SUMS, CudnnType::Fp32, self.rows(), None)?;
        g.pointwise(Pointwise::Mul, sum, Some(one), sums)?;

        // Weights, and the gradient of the value.
        let scores = g.between(CudnnType::Fp32, self.pairs())?;
        g.matmul(query, key, scores, [used, used, None])?;
        let scores = self.scale(g, scores)?;
        let apart = combine(g, Pointwise::Sub, scores, stats)?;
        let apart = self.masked(g, apart, used)?;
        let weights = apply(g, Pointwise::Exp, apart)?;
        let turned = g.view(weights, self.number, self.pairs().transposed(), None)?;
        self.of_kv(g, turned, grad, of_value, used)?;

        // The gradient of the scores, and that of the key.
        let of_weights = g.between(CudnnType::Fp32, self.pairs())?;
        g.matmul(grad, value, of_weights, [used, used, None])?;
        let apart = combine(g, Pointwise::Sub, of_weights, sums)?;
        let product = combine(g, Pointwise::Mul, apart, weights)?;
        let of_scores = self.scale(g, product)?;
        let turned = g.view(of_scores, self.number, self.pairs().transposed(), None)?;
        self.of_kv(g, turned, query, of_key, used)?;

        // The gradient of the query.
        let plain_key = g.view(key, self.number, plain_key, key_offsets)?;
        if grads.deterministic {
            g.matmul(of_scores, plain_key, of_query, [used, None, used])?;
        } else {
            let layout = Layout::packed(of_query.layout().sizes);
            let sum = g.tensor(DQ_SUM, CudnnType::Fp32, layout, None)?;
            g.matmul(of_scores, plain_key, sum, [used, None, used])?;
            g.pointwise(Pointwise::Identity, sum, None, of_query)?;
        }
        graph.plan(handle)
    }

    /// Adds `x @ y`, summed over the query heads that use each key and value head.
    fn of_kv(
        &self,
        g: &mut Graph,
        x: Node,
        y: Node,
        result: Node,
        used: Option<Node>,
    ) -> Result<(), CudnnError> {
        let used = [used, None, used];
        if self.heads == self.kv_heads {
            return g.matmul(x, y, result, used);
        }
        let sizes = [self.batch, self.heads, self.keys, self.head_dim];
        let of_heads = g.between(self.number, Layout::packed(sizes))?;
        g.matmul(x, y, of_heads, used)?;
        g.reduce(Reduction::Add, of_heads, result)
    }
}

/// Adds an fp32 operation of two tensors, with the larger one's sizes first.
fn combine(g: &mut Graph, op: Pointwise, x: Node, b: Node) -> Result<Node, CudnnError> {
    let output = g.between(CudnnType::Fp32, x.layout())?;
    g.pointwise(op, x, Some(b), output)?;
    Ok(output)
}

/// Adds an fp32 operation of one tensor.
fn apply(g: &mut Graph, op: Pointwise, x: Node) -> Result<Node, CudnnError> {
    let output = g.between(CudnnType::Fp32, x.layout())?;
    g.pointwise(op, x, None, output)?;
    Ok(output)
}
