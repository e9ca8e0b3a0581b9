//! Checks what `trainer` says of the GPUs: rates of copies, and the libraries that training uses.

use offload_support::gpu_facts::{CopiesFact, GpuFact, GpuFacts, LibraryFact};
use offload_support::units::ApproxRate;

use super::AskTrainerError;
use crate::findings::Finding;

/// Part of the planned rate below which copies are slow. Rates of one machine differ by some percent from one measurement to the next.
const SLOW: f64 = 0.8;

/// Checks the facts, or says why there are none.
pub(super) fn examine(facts: Result<GpuFacts, AskTrainerError>) -> Vec<Finding> {
    let facts = match facts {
        Ok(facts) => facts,
        Err(why) => {
            return vec![Finding::hint(
                "GPU facts",
                format!("rates of copies, NCCL and cuDNN were not checked: {why}"),
                "install `trainer` beside `offloadd`, or in a directory of PATH",
            )];
        }
    };
    let mut findings: Vec<Finding> = facts.gpus.iter().map(copies).collect();
    let unopened = |why: &String| {
        Finding::hint(
            "GPUs",
            why.clone(),
            "end what uses it alone; `nvidia-smi -q -d COMPUTE` shows its compute mode",
        )
    };
    findings.extend(facts.unopened.iter().map(unopened));
    findings.push(match &facts.torch_unusable {
        None => Finding::fine("torch", "computes on the GPU"),
        Some(why) => Finding::hint(
            "torch",
            format!("cannot compute on the GPU: {why}"),
            "pip install torch, a version that trainer names, built for this driver's CUDA",
        ),
    });
    findings.push(library(
        "NCCL",
        &facts.nccl,
        "without it no run uses several GPUs",
    ));
    findings.push(library(
        "cuDNN",
        &facts.cudnn,
        "without it attention on Hopper GPUs (H100, H200) is slower",
    ));
    findings
}

fn copies(gpu: &GpuFact) -> Finding {
    let subject = format!("copies of GPU {}", gpu.pci);
    let (to, from) = match gpu.copies {
        CopiesFact::Measured {
            to_gpu_bytes_per_s: to,
            from_gpu_bytes_per_s: from,
        } => (to, from),
        CopiesFact::Failed(ref why) => {
            return Finding::hint(
                subject,
                format!("were not measured: {why}"),
                "free memory on the GPU, and let processes lock more (`ulimit -l`); `nvidia-smi` shows what uses it",
            );
        }
    };
    let (to_text, from_text) = (ApproxRate(to), ApproxRate(from));
    let rates = format!("{to_text} to it and {from_text} from it at once, with pinned host memory");
    if to.min(from) >= SLOW * gpu.planned_bytes_per_s {
        return Finding::fine(subject, rates);
    }
    let planned = ApproxRate(gpu.planned_bytes_per_s);
    Finding::hint(
        subject,
        format!(
            "{rates}; plans assume {planned} each way: steps with state in host memory take longer"
        ),
        "end what else uses the GPU or its bus; use the cores and memory beside it: `nvidia-smi topo -m` shows the NUMA node, `numactl --cpunodebind=N --membind=N` takes it",
    )
}

fn library(name: &str, fact: &LibraryFact, without: &str) -> Finding {
    match fact {
        LibraryFact::Version(version) => Finding::fine(name, version.clone()),
        LibraryFact::Missing(why) => Finding::hint(
            name,
            format!("{without}: {why}"),
            "pip install torch with CUDA, which brings it",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::findings::Severity::{Fine, Hint};

    fn gpu(pci: &str, copies: CopiesFact) -> GpuFact {
        GpuFact {
            pci: pci.to_owned(),
            copies,
            planned_bytes_per_s: 50e9,
        }
    }

    fn measured(to: f64, from: f64) -> CopiesFact {
        CopiesFact::Measured {
            to_gpu_bytes_per_s: to * 1e9,
            from_gpu_bytes_per_s: from * 1e9,
        }
    }

    #[test]
    fn what_trainer_finds_is_said_with_what_to_do_where_it_is_slow_or_missing() {
        let facts = GpuFacts {
            gpus: vec![
                gpu("0", measured(51.0, 49.0)),
                gpu("1", measured(51.0, 12.0)),
                gpu("2", CopiesFact::Failed("out of memory".to_owned())),
            ],
            unopened: vec!["GPU 3: exclusive".to_owned()],
            torch_unusable: None,
            nccl: LibraryFact::Version("2.28.9".to_owned()),
            cudnn: LibraryFact::Missing("not found in /opt".to_owned()),
        };
        let said = |facts: &GpuFacts| -> Vec<_> {
            let found = examine(Ok(facts.clone()));
            assert!(
                (found.iter()).all(|one| one.fix.is_some() == (one.severity != Fine)),
                "{found:?}"
            );
            (found.iter())
                .map(|one| (one.severity, format!("{}: {}", one.subject, one.message)))
                .collect()
        };
        let found = said(&facts);
        for (severity, words) in [
            (
                Fine,
                "copies of GPU 0: 51.00 GB/s to it and 49.00 GB/s from it",
            ),
            (
                Hint,
                "copies of GPU 1: 51.00 GB/s to it and 12.00 GB/s from it at once, with pinned host memory; plans assume 50.00 GB/s",
            ),
            (Hint, "copies of GPU 2: were not measured: out of memory"),
            (Hint, "GPUs: GPU 3: exclusive"),
            (Fine, "torch: computes on the GPU"),
            (Fine, "NCCL: 2.28.9"),
            (
                Hint,
                "cuDNN: without it attention on Hopper GPUs (H100, H200) is slower: not found in /opt",
            ),
        ] {
            let is_said =
                |(found, text): &(_, String)| *found == severity && text.starts_with(words);
            assert!(found.iter().any(is_said), "{words}: {found:?}");
        }
        assert_eq!(found.len(), 7);
        let without = said(&GpuFacts {
            torch_unusable: Some("no libtorch_cuda.so".to_owned()),
            ..facts
        });
        let words = "torch: cannot compute on the GPU: no libtorch_cuda.so";
        assert!(without.contains(&(Hint, words.to_owned())), "{without:?}");
    }

    #[test]
    fn without_trainer_it_is_said_what_was_not_checked() {
        let found = examine(Err(AskTrainerError::Start {
            program: "trainer".into(),
            error: std::io::ErrorKind::NotFound.into(),
        }));
        assert_eq!((found.len(), found[0].severity), (1, Hint));
        let end = "were not checked: cannot start trainer: entity not found";
        assert!(found[0].message.ends_with(end), "{found:?}");
    }
}
