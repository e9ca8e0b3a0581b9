//! Compares cuDNN's attention with its definition in fp64, on a GPU: groups of heads, windows, lengths that are no multiple of a
//! tile, sequences in several blocks and batches in several chunks. Also compares two equal calls.

use std::process::Command;

use kernels::gpu::Gpu;
use kernels_torch::{
    CUBLAS_WORKSPACE, CUBLAS_WORKSPACES, CudnnAttention, CudnnError, PackedDocuments, TorchError,
    find_cudnn, load_gpu_half, use_gpu,
};
use tch::{Device, Kind, Tensor};

/// Runs the test `name` in a process of its own, with the setting under which products repeat their bits.
fn on_a_gpu(name: &str, test: impl FnOnce(&Gpu, Device)) {
    let Some(gpu) = gpu() else { return };
    if std::env::var_os(CUBLAS_WORKSPACE).is_some() {
        return test(&gpu, use_gpu(&gpu).unwrap());
    }
    let run = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(CUBLAS_WORKSPACE, CUBLAS_WORKSPACES[0])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&run.stdout).into_owned();
    print!("{said}");
    // A name that no test has would run nothing.
    assert!(
        run.status.success() && said.contains("1 passed"),
        "{said}\n{}",
        String::from_utf8_lossy(&run.stderr)
    );
}

/// Opens the GPU if cuDNN's attention can be used on it.
fn gpu() -> Option<Gpu> {
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(error) if error.is_absent() => {
            println!("skipped: {error}: cuDNN's attention");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    if let Err(error) = load_gpu_half().and_then(|()| find_cudnn(gpu.info())) {
        println!("skipped: {error}");
        return None;
    }
    Some(gpu)
}

struct Case {
    batch: i64,
    /// Of queries, and of keys and values.
    heads: [i64; 2],
    tokens: i64,
    head_dim: i64,
    window: Option<i64>,
    kind: Kind,
}

/// Query, key and value as parts of one tensor, and the gradient of the output, each [batch, heads, tokens, head_dim].
fn inputs(case: &Case, device: Device) -> ([Tensor; 3], Tensor) {
    let [heads, kv_heads] = case.heads;
    let shape = [case.batch, case.tokens, heads + 2 * kv_heads, case.head_dim];
    let qkv = Tensor::randn(shape, (case.kind, device)).transpose(1, 2);
    let grad_shape = [case.batch, case.tokens, heads, case.head_dim];
    let grad = Tensor::randn(grad_shape, (case.kind, device)).transpose(1, 2);
    let part = |start, count| qkv.narrow(1, start, count);
    let parts = [
        part(0, heads),
        part(heads, kv_heads),
        part(heads + kv_heads, kv_heads),
    ];
    (parts, grad)
}

/// Output and gradients of query, key and value by definition, for the first sequence and its first key head.
fn definition(case: &Case, [query, key, value]: [&Tensor; 3], grad: &Tensor) -> Vec<Tensor> {
    let share = case.heads[0] / case.heads[1];
    let leaf = |x: &Tensor, heads| {
        let x = x.narrow(0, 0, 1).narrow(1, 0, heads).to_kind(Kind::Double);
        x.set_requires_grad(true)
    };
    let (query, key, value) = (leaf(query, share), leaf(key, 1), leaf(value, 1));
    let scores = query.matmul(&key.transpose(-2, -1)) / (case.head_dim as f64).sqrt();
    let seen = Tensor::ones([case.tokens; 2], (Kind::Bool, query.device())).tril(0);
    let seen = match case.window {
        Some(window) => seen.triu(1 - window),
        None => seen,
    };
    let weights = scores
        .masked_fill(&seen.logical_not(), f64::NEG_INFINITY)
        .softmax(-1, Kind::Double);
    let output = weights.matmul(&value);
    let grad = grad
        .narrow(0, 0, 1)
        .narrow(1, 0, share)
        .to_kind(Kind::Double);
    let found = Tensor::run_backward(
        &[(&output * grad).sum(Kind::Double)],
        &[&query, &key, &value],
        false,
        false,
    );
    std::iter::once(output.detach()).chain(found).collect()
}

fn apart(found: &Tensor, wanted: &Tensor) -> f64 {
    let size = wanted.size();
    let found = found
        .narrow(0, 0, 1)
        .narrow(1, 0, size[1])
        .to_kind(Kind::Double);
    f64::try_from((found - wanted).norm() / wanted.norm()).unwrap()
}

#[test]
fn cudnns_attention_is_what_its_definition_says_and_repeats_in_bits() {
    on_a_gpu(
        "cudnns_attention_is_what_its_definition_says_and_repeats_in_bits",
        attention_repeats_in_bits,
    );
}

fn attention_repeats_in_bits(gpu: &Gpu, device: Device) {
    let exact = CudnnAttention::open(gpu, true).unwrap();
    let free = CudnnAttention::open(gpu, false).unwrap();
    let case = |batch, heads, tokens, head_dim, window| Case {
        batch,
        heads,
        tokens,
        head_dim,
        window,
        kind: Kind::BFloat16,
    };
    let fp16 = Case {
        kind: Kind::Half,
        ..case(3, [8, 2], 1000, 64, None)
    };
    for case in [
        case(2, [4, 4], 512, 128, None),
        case(2, [8, 2], 1000, 128, None),
        case(1, [4, 1], 777, 80, None),
        case(1, [4, 2], 1024, 256, None),
        // Several chunks.
        case(40, [16, 8], 2048, 64, None),
        // Several blocks, without and with a window.
        case(1, [2, 1], 16500, 64, None),
        case(2, [4, 2], 3000, 128, Some(300)),
        case(1, [2, 2], 5001, 64, Some(2000)),
        fp16,
    ] {
        let Case {
            batch,
            heads: [heads, kv_heads],
            tokens,
            head_dim,
            window,
            kind,
        } = case;
        let what = format!("{batch} x {heads}/{kv_heads} x {tokens} x {head_dim}, {window:?}");
        let ([query, key, value], grad) = inputs(&case, device);
        let qkv = [&query, &key, &value];
        let run = |attention: &CudnnAttention| {
            let attended = attention.forward(qkv, window, None).unwrap();
            let output = attended.output.transpose(1, 2);
            // Whatever is not written stays visible.
            let new = |x: &Tensor| Tensor::full(x.size(), f64::NAN, (kind, device));
            let grads = qkv.map(new);
            let [of_query, of_key, of_value] = &grads;
            attention
                .backward(
                    qkv,
                    window,
                    None,
                    (&output, &attended.stats),
                    &grad,
                    [of_query, of_key, of_value],
                )
                .unwrap();
            std::iter::once(output).chain(grads).collect::<Vec<_>>()
        };
        let (first, again, other) = (run(&exact), run(&exact), run(&free));
        let same = first.iter().zip(&again).all(|(a, b)| a.equal(b));
        assert!(same, "{what}: two equal calls differ");
        let wanted = definition(&case, qkv, &grad);
        for (at, wanted) in wanted.iter().enumerate() {
            let distances = [apart(&first[at], wanted), apart(&other[at], wanted)];
            println!("{what}, {at}: {distances:?}");
            // A NaN fails too.
            assert!(
                distances.iter().all(|&x| x < 6e-3),
                "{what}, {at}: {distances:?}"
            );
        }
    }
}

/// Documents of many lengths in two sequences: each has the bits, or nearly so, that it has alone.
#[test]
fn cudnns_attention_stays_within_documents() {
    on_a_gpu(
        "cudnns_attention_stays_within_documents",
        attention_stays_within_documents,
    );
}

fn attention_stays_within_documents(gpu: &Gpu, device: Device) {
    let attention = CudnnAttention::open(gpu, true).unwrap();
    let lengths = [1i64, 300, 128, 129, 2000, 64, 5000, 7, 7, 556, 4096, 4096];
    for ([heads, kv_heads], head_dim, window) in [
        ([8, 8], 128, None),
        ([8, 2], 64, None),
        ([4, 2], 128, Some(200)),
    ] {
        let case = Case {
            batch: 2,
            heads: [heads, kv_heads],
            tokens: 8192,
            head_dim,
            window,
            kind: Kind::BFloat16,
        };
        let ([query, key, value], grad) = inputs(&case, device);
        let new = |x: &Tensor| Tensor::full_like(&x.transpose(1, 2).contiguous(), f64::NAN);
        let run = |x: [&Tensor; 3], grad: &Tensor, documents: Option<&PackedDocuments>| {
            let attended = attention.forward(x, window, documents).unwrap();
            let output = attended.output.transpose(1, 2);
            let grads = x.map(|x| new(x).transpose(1, 2));
            let [of_query, of_key, of_value] = &grads;
            let of = [of_query, of_key, of_value];
            let forward = (&output, &attended.stats[..]);
            attention
                .backward(x, window, documents, forward, grad, of)
                .unwrap();
            std::iter::once(output).chain(grads).collect::<Vec<_>>()
        };
        let packed = PackedDocuments::new(&lengths, heads, device).unwrap();
        let qkv = [&query, &key, &value];
        let together = run(qkv, &grad, Some(&packed));
        let again = run(qkv, &grad, Some(&packed));
        let same = together.iter().zip(&again).all(|(a, b)| a.equal(b));
        assert!(same, "{heads}/{kv_heads}: two equal calls differ");
        let (mut at, mut farthest) = (0, 0f64);
        for length in lengths {
            let part = |x: &Tensor| {
                let row = x.narrow(0, at / case.tokens, 1);
                row.narrow(2, at % case.tokens, length)
            };
            let alone = qkv.map(part);
            // With the layout of a new output.
            let shape = [1, length, heads, head_dim];
            let mut fresh = Tensor::empty(shape, (case.kind, device));
            fresh.copy_(&part(&grad).transpose(1, 2));
            let grad = fresh.transpose(1, 2);
            let alone = run([&alone[0], &alone[1], &alone[2]], &grad, None);
            for (together, alone) in together.iter().map(part).zip(&alone) {
                let wide = |x: &Tensor| x.to_kind(Kind::Double);
                // The gradients of query and key of a single token are zero.
                let size = wide(alone).norm().clamp_min(1e-3);
                let distance = (wide(&together) - wide(alone)).norm() / size;
                let distance = f64::try_from(distance).unwrap();
                // A NaN fails too.
                assert!(
                    distance < 6e-3,
                    "a document of {length} tokens: {distance:.1e}"
                );
                farthest = farthest.max(distance);
            }
            at += length;
        }
        println!("documents, {heads}/{kv_heads} x {head_dim}, {window:?}: {farthest:.1e}");
    }
}

/// Without a GPU of the right kind, the reason is named.
#[test]
fn other_gpus_are_refused_by_name() {
    let info = |vendor, arch: &str| kernels::gpu::GpuInfo {
        vendor,
        index: 0,
        name: "a GPU".into(),
        arch: arch.into(),
        pci: String::new(),
        memory_bytes: 0,
        driver: String::new(),
    };
    for (vendor, arch) in [
        (kernels::gpu::Vendor::Cuda, "sm_80"),
        (kernels::gpu::Vendor::Cuda, "sm_100"),
        (kernels::gpu::Vendor::Hip, "gfx942"),
    ] {
        let error = find_cudnn(&info(vendor, arch)).unwrap_err();
        assert!(
            matches!(&error, TorchError::Cudnn(CudnnError::Architecture { .. })),
            "{error}"
        );
        assert!(error.to_string().contains(arch), "{error}");
    }
}
