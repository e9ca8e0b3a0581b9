//! Graphs of operations, built as cuDNN's descriptors, and their execution plans.
//!
//! A descriptor is created, given attributes and finalized; then others refer to it. [`Graph`] keeps those of one graph alive
//! until its [`Plan`] is made, which keeps them too.

use std::ffi::c_void;

use super::CudnnError;
use super::library::Library9;

// Numbers of cudnn_graph.h, the same in every cuDNN 9.
const BACKEND_POINTWISE: i32 = 0;
const BACKEND_ENGINEHEUR: i32 = 4;
const BACKEND_ENGINECFG: i32 = 3;
const BACKEND_EXECUTION_PLAN: i32 = 5;
const BACKEND_OPERATION_POINTWISE: i32 = 13;
const BACKEND_OPERATIONGRAPH: i32 = 15;
const BACKEND_VARIANT_PACK: i32 = 16;
const BACKEND_TENSOR: i32 = 17;
const BACKEND_MATMUL: i32 = 18;
const BACKEND_OPERATION_MATMUL: i32 = 19;
const BACKEND_REDUCTION: i32 = 21;
const BACKEND_OPERATION_REDUCTION: i32 = 22;
const BACKEND_OPERATION_RESHAPE: i32 = 31;

const TYPE_HANDLE: i32 = 0;
const TYPE_DATA_TYPE: i32 = 1;
const TYPE_BOOLEAN: i32 = 2;
const TYPE_INT64: i32 = 3;
const TYPE_VOID_PTR: i32 = 6;
const TYPE_HEUR_MODE: i32 = 8;
const TYPE_POINTWISE_MODE: i32 = 14;
const TYPE_DESCRIPTOR: i32 = 15;
const TYPE_REDUCTION_OPERATOR: i32 = 18;

const HEUR_MODE_A: i32 = 3;
const HEUR_MODE_FALLBACK: i32 = 2;

/// Kind of the numbers of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum CudnnType {
    Fp32 = 0,
    Fp16 = 2,
    Int32 = 4,
    Bf16 = 9,
    Int64 = 10,
    Boolean = 11,
}

/// Elementwise operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pointwise {
    Add = 0,
    Mul = 1,
    Div = 6,
    Sub = 9,
    Exp = 13,
    Log = 15,
    Identity = 21,
    Greater = 302,
    AtLeast = 303,
    Less = 304,
    And = 400,
    Index = 501,
    Select = 601,
}

/// Reduction over the dimensions in which its output has size 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reduction {
    Add = 0,
    Max = 3,
}

/// Number by which a plan is given the address of a tensor.
pub(super) type Uid = i64;

/// Sizes and strides of a tensor of 4 dimensions, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Layout {
    pub(super) sizes: [i64; 4],
    pub(super) strides: [i64; 4],
}

impl Layout {
    /// Contiguous, the last dimension innermost.
    pub(super) fn packed(sizes: [i64; 4]) -> Self {
        let [_, b, c, d] = sizes;
        Self {
            sizes,
            strides: [b * c * d, c * d, d, 1],
        }
    }

    /// The last two dimensions exchanged.
    pub(super) fn transposed(self) -> Self {
        let swap = |[a, b, c, d]: [i64; 4]| [a, b, d, c];
        Self {
            sizes: swap(self.sizes),
            strides: swap(self.strides),
        }
    }
}

/// A descriptor of cuDNN.
struct Descriptor {
    library: &'static Library9,
    raw: usize,
}

impl Descriptor {
    fn new(library: &'static Library9, kind: i32) -> Result<Self, CudnnError> {
        let mut raw = 0;
        // SAFETY: the pointer is live for the call.
        let status = unsafe { (library.create_descriptor)(kind, &mut raw) };
        library.check(status, "making a descriptor")?;
        Ok(Self { library, raw })
    }

    /// Gives an attribute `values`, of the type that cuDNN calls `kind`.
    fn set<T>(&mut self, attribute: i32, kind: i32, values: &[T]) -> Result<(), CudnnError> {
        // SAFETY: cuDNN copies as many elements as stated; every caller passes the type that belongs to `kind`: int for
        // enumerations, i64, bool, pointer-sized for descriptors, handles and addresses.
        let status = unsafe {
            (self.library.set)(
                self.raw,
                attribute,
                kind,
                values.len() as i64,
                values.as_ptr().cast(),
            )
        };
        self.library.check(status, "setting an attribute")
    }

    fn finalize(&mut self, op: &'static str) -> Result<(), CudnnError> {
        // SAFETY: the descriptor is live.
        let status = unsafe { (self.library.finalize)(self.raw) };
        self.library.check(status, op)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once.
        unsafe { (self.library.destroy_descriptor)(self.raw) };
    }
}

/// Tensor of a graph under construction.
#[derive(Clone, Copy, Debug)]
pub(super) struct Node {
    index: usize,
    layout: Layout,
}

impl Node {
    pub(super) fn layout(&self) -> Layout {
        self.layout
    }
}

/// Where a tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In device memory, at an address that a plan is given.
    Memory,
    /// Only within the graph.
    Graph,
    /// In the list of addresses itself.
    Value,
}

/// A graph under construction.
pub(super) struct Graph {
    library: &'static Library9,
    /// Tensors, and the descriptors that operations refer to.
    parts: Vec<Descriptor>,
    operations: Vec<Descriptor>,
    /// Numbers that are passed by value, by their uid.
    constants: Vec<(Uid, [u8; 4])>,
    next_uid: Uid,
}

/// First uid that a graph gives to its own tensors; smaller ones are the caller's.
const OWN_UIDS: Uid = 1000;

/// Alignment of every tensor that is not a constant.
const ALIGNMENT_BYTES: i64 = 16;

impl Graph {
    pub(super) fn new(library: &'static Library9) -> Self {
        Self {
            library,
            parts: Vec::new(),
            operations: Vec::new(),
            constants: Vec::new(),
            next_uid: OWN_UIDS,
        }
    }

    /// A tensor whose address is given to the plan under `uid`. With `offsets`, entry `i` of its first dimension starts at
    /// element `offsets[i]`.
    pub(super) fn tensor(
        &mut self,
        uid: Uid,
        number: CudnnType,
        layout: Layout,
        offsets: Option<Node>,
    ) -> Result<Node, CudnnError> {
        assert!(uid < OWN_UIDS, "uid {uid} is not the caller's");
        self.add_tensor(uid, number, layout, Place::Memory, offsets)
    }

    /// A result that exists only within the graph.
    pub(super) fn between(
        &mut self,
        number: CudnnType,
        layout: Layout,
    ) -> Result<Node, CudnnError> {
        let uid = self.own_uid();
        self.add_tensor(uid, number, layout, Place::Graph, None)
    }

    /// The elements of `x`, in other sizes and strides of the same memory.
    pub(super) fn view(
        &mut self,
        x: Node,
        number: CudnnType,
        layout: Layout,
        offsets: Option<Node>,
    ) -> Result<Node, CudnnError> {
        let uid = self.own_uid();
        let view = self.add_tensor(uid, number, layout, Place::Graph, offsets)?;
        self.reshape(x, view)?;
        Ok(view)
    }

    /// An fp32 constant.
    pub(super) fn constant(&mut self, value: f32) -> Result<Node, CudnnError> {
        let uid = self.own_uid();
        self.constants.push((uid, value.to_ne_bytes()));
        let layout = Layout::packed([1; 4]);
        self.add_tensor(uid, CudnnType::Fp32, layout, Place::Value, None)
    }

    fn own_uid(&mut self) -> Uid {
        self.next_uid += 1;
        self.next_uid
    }

    fn add_tensor(
        &mut self,
        uid: Uid,
        number: CudnnType,
        layout: Layout,
        place: Place,
        offsets: Option<Node>,
    ) -> Result<Node, CudnnError> {
        const ATTR_BYTE_ALIGNMENT: i32 = 900;
        const ATTR_DATA_TYPE: i32 = 901;
        const ATTR_DIMENSIONS: i32 = 902;
        const ATTR_STRIDES: i32 = 903;
        const ATTR_UNIQUE_ID: i32 = 906;
        const ATTR_IS_VIRTUAL: i32 = 907;
        const ATTR_IS_BY_VALUE: i32 = 908;
        const ATTR_RAGGED_OFFSET: i32 = 913;
        let mut tensor = Descriptor::new(self.library, BACKEND_TENSOR)?;
        tensor.set(ATTR_DATA_TYPE, TYPE_DATA_TYPE, &[number as i32])?;
        tensor.set(ATTR_DIMENSIONS, TYPE_INT64, &layout.sizes)?;
        tensor.set(ATTR_STRIDES, TYPE_INT64, &layout.strides)?;
        tensor.set(ATTR_UNIQUE_ID, TYPE_INT64, &[uid])?;
        tensor.set(ATTR_BYTE_ALIGNMENT, TYPE_INT64, &[ALIGNMENT_BYTES])?;
        tensor.set(ATTR_IS_VIRTUAL, TYPE_BOOLEAN, &[place == Place::Graph])?;
        tensor.set(ATTR_IS_BY_VALUE, TYPE_BOOLEAN, &[place == Place::Value])?;
        if let Some(offsets) = offsets {
            tensor.set(ATTR_RAGGED_OFFSET, TYPE_DESCRIPTOR, &self.raw(offsets))?;
        }
        tensor.finalize("describing a tensor")?;
        self.parts.push(tensor);
        Ok(Node {
            index: self.parts.len() - 1,
            layout,
        })
    }

    fn raw(&self, node: Node) -> [usize; 1] {
        [self.parts[node.index].raw]
    }

    /// Adds `output = op(x)` or `op(x, b)`.
    pub(super) fn pointwise(
        &mut self,
        op: Pointwise,
        x: Node,
        b: Option<Node>,
        output: Node,
    ) -> Result<(), CudnnError> {
        self.add_pointwise(op, CudnnType::Fp32, None, x, b, None, output)
    }

    /// Adds `output = index of each element of x along axis`.
    pub(super) fn index(&mut self, x: Node, axis: i64, output: Node) -> Result<(), CudnnError> {
        let op = Pointwise::Index;
        self.add_pointwise(op, CudnnType::Int32, Some(axis), x, None, None, output)
    }

    /// Adds `output = x op b`, true or false, of numbers or of such results.
    pub(super) fn compare(
        &mut self,
        op: Pointwise,
        x: Node,
        b: Node,
        output: Node,
    ) -> Result<(), CudnnError> {
        self.add_pointwise(op, CudnnType::Boolean, None, x, Some(b), None, output)
    }

    /// Adds `output = if condition { x } else { b }`.
    pub(super) fn select(
        &mut self,
        condition: Node,
        x: Node,
        b: Node,
        output: Node,
    ) -> Result<(), CudnnError> {
        let op = Pointwise::Select;
        self.add_pointwise(
            op,
            CudnnType::Fp32,
            None,
            x,
            Some(b),
            Some(condition),
            output,
        )
    }

    #[allow(clippy::too_many_arguments)] // the operands of one operation
    fn add_pointwise(
        &mut self,
        op: Pointwise,
        precision: CudnnType,
        axis: Option<i64>,
        x: Node,
        b: Option<Node>,
        condition: Option<Node>,
        output: Node,
    ) -> Result<(), CudnnError> {
        const ATTR_MODE: i32 = 0;
        const ATTR_MATH_PREC: i32 = 1;
        const ATTR_AXIS: i32 = 9;
        const ATTR_PW_DESCRIPTOR: i32 = 750;
        const ATTR_XDESC: i32 = 751;
        const ATTR_BDESC: i32 = 752;
        const ATTR_YDESC: i32 = 753;
        const ATTR_TDESC: i32 = 758;
        let mut kind = Descriptor::new(self.library, BACKEND_POINTWISE)?;
        kind.set(ATTR_MODE, TYPE_POINTWISE_MODE, &[op as i32])?;
        kind.set(ATTR_MATH_PREC, TYPE_DATA_TYPE, &[precision as i32])?;
        if let Some(axis) = axis {
            kind.set(ATTR_AXIS, TYPE_INT64, &[axis])?;
        }
        kind.finalize("describing an elementwise operation")?;
        let mut operation = Descriptor::new(self.library, BACKEND_OPERATION_POINTWISE)?;
        operation.set(ATTR_PW_DESCRIPTOR, TYPE_DESCRIPTOR, &[kind.raw])?;
        operation.set(ATTR_XDESC, TYPE_DESCRIPTOR, &self.raw(x))?;
        if let Some(b) = b {
            operation.set(ATTR_BDESC, TYPE_DESCRIPTOR, &self.raw(b))?;
        }
        if let Some(condition) = condition {
            operation.set(ATTR_TDESC, TYPE_DESCRIPTOR, &self.raw(condition))?;
        }
        operation.set(ATTR_YDESC, TYPE_DESCRIPTOR, &self.raw(output))?;
        self.finish(kind, operation, "an elementwise operation")
    }

    /// Adds `output = x @ y`, summed in fp32. `used` has, for each matrix of the batch, how many of the rows of `x`, of the columns
    /// of `y`, and of the elements of their products are used.
    pub(super) fn matmul(
        &mut self,
        x: Node,
        y: Node,
        output: Node,
        used: [Option<Node>; 3],
    ) -> Result<(), CudnnError> {
        const ATTR_COMP_TYPE: i32 = 1500;
        const ATTR_ADESC: i32 = 1520;
        const ATTR_BDESC: i32 = 1521;
        const ATTR_CDESC: i32 = 1522;
        const ATTR_DESC: i32 = 1523;
        const ATTR_USED: [i32; 3] = [1525, 1526, 1527];
        let mut kind = Descriptor::new(self.library, BACKEND_MATMUL)?;
        kind.set(ATTR_COMP_TYPE, TYPE_DATA_TYPE, &[CudnnType::Fp32 as i32])?;
        kind.finalize("describing a matrix product")?;
        let mut operation = Descriptor::new(self.library, BACKEND_OPERATION_MATMUL)?;
        operation.set(ATTR_ADESC, TYPE_DESCRIPTOR, &self.raw(x))?;
        operation.set(ATTR_BDESC, TYPE_DESCRIPTOR, &self.raw(y))?;
        operation.set(ATTR_CDESC, TYPE_DESCRIPTOR, &self.raw(output))?;
        operation.set(ATTR_DESC, TYPE_DESCRIPTOR, &[kind.raw])?;
        for (attribute, used) in ATTR_USED.into_iter().zip(used) {
            if let Some(used) = used {
                operation.set(attribute, TYPE_DESCRIPTOR, &self.raw(used))?;
            }
        }
        self.finish(kind, operation, "a matrix product")
    }

    /// Adds a reduction of `x` to the sizes of `output`, in fp32.
    pub(super) fn reduce(
        &mut self,
        op: Reduction,
        x: Node,
        output: Node,
    ) -> Result<(), CudnnError> {
        const ATTR_OPERATOR: i32 = 1600;
        const ATTR_COMP_TYPE: i32 = 1601;
        const ATTR_XDESC: i32 = 1610;
        const ATTR_YDESC: i32 = 1611;
        const ATTR_DESC: i32 = 1612;
        let mut kind = Descriptor::new(self.library, BACKEND_REDUCTION)?;
        kind.set(ATTR_OPERATOR, TYPE_REDUCTION_OPERATOR, &[op as i32])?;
        kind.set(ATTR_COMP_TYPE, TYPE_DATA_TYPE, &[CudnnType::Fp32 as i32])?;
        kind.finalize("describing a reduction")?;
        let mut operation = Descriptor::new(self.library, BACKEND_OPERATION_REDUCTION)?;
        operation.set(ATTR_XDESC, TYPE_DESCRIPTOR, &self.raw(x))?;
        operation.set(ATTR_YDESC, TYPE_DESCRIPTOR, &self.raw(output))?;
        operation.set(ATTR_DESC, TYPE_DESCRIPTOR, &[kind.raw])?;
        self.finish(kind, operation, "a reduction")
    }

    fn reshape(&mut self, x: Node, output: Node) -> Result<(), CudnnError> {
        const ATTR_XDESC: i32 = 2200;
        const ATTR_YDESC: i32 = 2201;
        let mut operation = Descriptor::new(self.library, BACKEND_OPERATION_RESHAPE)?;
        operation.set(ATTR_XDESC, TYPE_DESCRIPTOR, &self.raw(x))?;
        operation.set(ATTR_YDESC, TYPE_DESCRIPTOR, &self.raw(output))?;
        operation.finalize("adding a reshape")?;
        self.operations.push(operation);
        Ok(())
    }

    fn finish(
        &mut self,
        kind: Descriptor,
        mut operation: Descriptor,
        op: &'static str,
    ) -> Result<(), CudnnError> {
        operation.finalize(op)?;
        self.parts.push(kind);
        self.operations.push(operation);
        Ok(())
    }

    /// Chooses the first engine that supports the graph on the GPU of `handle`: those that cuDNN's heuristics rank, then those of last resort.
    ///
    /// # Errors
    /// No engine supports it; an error of cuDNN.
    pub(super) fn plan(self, handle: usize) -> Result<Plan, CudnnError> {
        const ATTR_GRAPH_HANDLE: i32 = 800;
        const ATTR_GRAPH_OPS: i32 = 801;
        let library = self.library;
        let mut graph = Descriptor::new(library, BACKEND_OPERATIONGRAPH)?;
        let operations: Vec<usize> = self.operations.iter().map(|op| op.raw).collect();
        graph.set(ATTR_GRAPH_OPS, TYPE_DESCRIPTOR, &operations)?;
        graph.set(ATTR_GRAPH_HANDLE, TYPE_HANDLE, &[handle])?;
        graph.finalize("joining the operations to a graph")?;
        let mut refusal = None;
        for mode in [HEUR_MODE_A, HEUR_MODE_FALLBACK] {
            for config in configs(library, &graph, mode)? {
                match execution_plan(library, &config, handle) {
                    Ok(plan) => {
                        let workspace_bytes = workspace_bytes(&plan)?;
                        return Ok(Plan {
                            plan,
                            workspace_bytes,
                            constants: self.constants,
                            _config: config,
                            _graph: graph,
                            _operations: self.operations,
                            _parts: self.parts,
                        });
                    }
                    Err(why) => {
                        if !why.is_refusal() {
                            tracing::warn!(
                                "{why}: another of cuDNN's kernels is used, whose results may have other bits than those of other runs"
                            );
                        }
                        refusal = Some(why);
                    }
                }
            }
        }
        Err(refusal.unwrap_or(CudnnError::NoEngine))
    }
}

/// Engines for `graph`, the best first.
fn configs(
    library: &'static Library9,
    graph: &Descriptor,
    mode: i32,
) -> Result<Vec<Descriptor>, CudnnError> {
    const ATTR_MODE: i32 = 200;
    const ATTR_OPERATION_GRAPH: i32 = 201;
    const ATTR_RESULTS: i32 = 202;
    let mut heuristics = Descriptor::new(library, BACKEND_ENGINEHEUR)?;
    heuristics.set(ATTR_OPERATION_GRAPH, TYPE_DESCRIPTOR, &[graph.raw])?;
    heuristics.set(ATTR_MODE, TYPE_HEUR_MODE, &[mode])?;
    if heuristics.finalize("asking for engines").is_err() {
        return Ok(Vec::new());
    }
    let mut count = 0;
    // SAFETY: a count of 0 asks only for the number, which is written to the live pointer.
    let status = unsafe {
        (library.get)(
            heuristics.raw,
            ATTR_RESULTS,
            TYPE_DESCRIPTOR,
            0,
            &mut count,
            std::ptr::null_mut(),
        )
    };
    library.check(status, "counting engines")?;
    let mut found = (0..count)
        .map(|_| Descriptor::new(library, BACKEND_ENGINECFG))
        .collect::<Result<Vec<_>, _>>()?;
    let mut raw: Vec<usize> = found.iter().map(|config| config.raw).collect();
    let mut filled = 0;
    // SAFETY: as many descriptors as stated, each live, are filled.
    let status = unsafe {
        (library.get)(
            heuristics.raw,
            ATTR_RESULTS,
            TYPE_DESCRIPTOR,
            count,
            &mut filled,
            raw.as_mut_ptr().cast(),
        )
    };
    library.check(status, "listing engines")?;
    found.truncate(filled as usize);
    Ok(found)
}

fn execution_plan(
    library: &'static Library9,
    config: &Descriptor,
    handle: usize,
) -> Result<Descriptor, CudnnError> {
    const ATTR_HANDLE: i32 = 400;
    const ATTR_ENGINE_CONFIG: i32 = 401;
    let mut plan = Descriptor::new(library, BACKEND_EXECUTION_PLAN)?;
    plan.set(ATTR_ENGINE_CONFIG, TYPE_DESCRIPTOR, &[config.raw])?;
    plan.set(ATTR_HANDLE, TYPE_HANDLE, &[handle])?;
    plan.finalize("making an execution plan")?;
    Ok(plan)
}

fn workspace_bytes(plan: &Descriptor) -> Result<usize, CudnnError> {
    const ATTR_WORKSPACE_SIZE: i32 = 402;
    let (mut bytes, mut count) = (0i64, 0i64);
    // SAFETY: one i64 is written to `bytes`, and their number to `count`.
    let status = unsafe {
        (plan.library.get)(
            plan.raw,
            ATTR_WORKSPACE_SIZE,
            TYPE_INT64,
            1,
            &mut count,
            (&raw mut bytes).cast(),
        )
    };
    plan.library
        .check(status, "asking for a plan's workspace")?;
    Ok(bytes.max(0) as usize)
}

/// A graph with the engine that computes it.
pub(super) struct Plan {
    plan: Descriptor,
    pub(super) workspace_bytes: usize,
    constants: Vec<(Uid, [u8; 4])>,
    _config: Descriptor,
    _graph: Descriptor,
    _operations: Vec<Descriptor>,
    _parts: Vec<Descriptor>,
}

impl Plan {
    /// Enqueues the computation on the handle's stream.
    ///
    /// # Safety
    /// `handle` comes from `cudnnCreate`, and the plan was made for it. `addresses` are those of every tensor of the graph,
    /// which lie in device memory of their layouts; `workspace` has [`Plan::workspace_bytes`] bytes there. All stay
    /// allocated, and outputs are used by no one else, until the stream has done the work.
    pub(super) unsafe fn enqueue(
        &self,
        handle: usize,
        addresses: &[(Uid, *mut c_void)],
        workspace: *mut c_void,
    ) -> Result<(), CudnnError> {
        const ATTR_UNIQUE_IDS: i32 = 1000;
        const ATTR_DATA_POINTERS: i32 = 1001;
        const ATTR_WORKSPACE: i32 = 1003;
        let library = self.plan.library;
        let mut constants = self.constants.clone();
        let constants = constants
            .iter_mut()
            .map(|(uid, value)| (*uid, value.as_mut_ptr().cast()));
        let (uids, pointers): (Vec<Uid>, Vec<*mut c_void>) =
            addresses.iter().copied().chain(constants).unzip();
        let mut pack = Descriptor::new(library, BACKEND_VARIANT_PACK)?;
        pack.set(ATTR_UNIQUE_IDS, TYPE_INT64, &uids)?;
        pack.set(ATTR_DATA_POINTERS, TYPE_VOID_PTR, &pointers)?;
        pack.set(ATTR_WORKSPACE, TYPE_VOID_PTR, &[workspace])?;
        pack.finalize("listing the tensors' addresses")?;
        // SAFETY: the caller's promise; constants are read during the call.
        let status = unsafe { (library.execute)(handle, self.plan.raw, pack.raw) };
        library.check(status, "computing attention")
    }
}
