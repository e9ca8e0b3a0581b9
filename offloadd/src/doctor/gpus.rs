//! Checks NVIDIA's GPUs by what their driver says: errors of memory, power, heat, and whether they reach each other.

use offload_support::nvidia::{NvidiaGpu, NvidiaGpus};
use offload_support::units::ApproxBytes;

use crate::findings::Finding;

/// Checks the GPUs; nothing without NVIDIA's driver.
pub(super) fn examine(found: Option<NvidiaGpus>) -> Vec<Finding> {
    let Some(NvidiaGpus { cuda, gpus, apart }) = found else {
        return Vec::new();
    };
    let mut findings: Vec<Finding> = (gpus.iter().enumerate())
        .flat_map(|(number, gpu)| of_gpu(number, gpu, cuda))
        .collect();
    let Some(apart) = apart else {
        return findings;
    };
    findings.extend(apart.iter().map(|(a, b)| {
        Finding::hint(
            format!("GPUs {a} and {b}"),
            "cannot read each other's memory: ranks exchange weights and gradients through host memory, several times as slowly",
            "NVLink, or slots below one PCIe switch; in a virtual machine, the host's settings for peer access; `nvidia-smi topo -p2p r` shows all pairs",
        )
    }));
    if gpus.len() > 1 && apart.is_empty() {
        let all = format!("all {} reach each other's memory", gpus.len());
        findings.push(Finding::fine("GPUs", all));
    }
    findings
}

fn of_gpu(number: usize, gpu: &NvidiaGpu, (major, minor): (i32, i32)) -> Vec<Finding> {
    let subject = || format!("GPU {number}");
    let bytes = ApproxBytes(gpu.memory_bytes);
    let name = format!("{}, {bytes}, CUDA up to {major}.{minor}", gpu.name);
    let mut findings = vec![Finding::fine(subject(), name)];
    if let Some(errors) = gpu.uncorrected_errors.filter(|&errors| errors > 0) {
        findings.push(Finding::problem(
            subject(),
            format!(
                "{errors} errors of its memory were not corrected since the driver was loaded: results may be wrong"
            ),
            format!(
                "end what runs there, then `sudo nvidia-smi -i {number} -r`; have a GPU replaced that has them again; `nvidia-smi -q -d ECC` shows them"
            ),
        ));
    }
    if let Some((now, most)) = gpu.power_limits_mw.filter(|(now, most)| now < most) {
        let watts = |mw: u32| mw / 1000;
        findings.push(Finding::hint(
            subject(),
            format!("may take {} W, of {} W", watts(now), watts(most)),
            format!("sudo nvidia-smi -i {number} -pl {}", watts(most)),
        ));
    }
    if let Some(why) = gpu.slowed_by {
        findings.push(Finding::hint(
            subject(),
            format!("is slowed down by {why}"),
            "check fans, air and power; `nvidia-smi -q -d PERFORMANCE,TEMPERATURE` shows more",
        ));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::findings::Severity::{Fine, Hint, Problem};

    fn h200() -> NvidiaGpu {
        NvidiaGpu {
            name: "NVIDIA H200".to_owned(),
            memory_bytes: 150_754_820_096,
            uncorrected_errors: Some(0),
            power_limits_mw: Some((700_000, 700_000)),
            slowed_by: None,
        }
    }

    #[test]
    fn what_is_wrong_with_a_gpu_is_named_with_what_to_do() {
        let gpus = vec![
            h200(),
            NvidiaGpu {
                uncorrected_errors: Some(3),
                ..h200()
            },
            NvidiaGpu {
                power_limits_mw: Some((300_000, 700_000)),
                slowed_by: Some("heat"),
                ..h200()
            },
            NvidiaGpu {
                name: "NVIDIA GeForce RTX 4090".to_owned(),
                uncorrected_errors: None,
                power_limits_mw: None,
                ..h200()
            },
        ];
        let found = examine(Some(NvidiaGpus {
            cuda: (13, 0),
            gpus,
            apart: Some(vec![(0, 3), (1, 3)]),
        }));
        let said: Vec<_> = (found.iter())
            .map(|one| (one.severity, format!("{}: {}", one.subject, one.message)))
            .collect();
        for (severity, words) in [
            (Fine, "GPU 0: NVIDIA H200, 140.4 GiB, CUDA up to 13.0"),
            (Problem, "GPU 1: 3 errors of its memory were not corrected"),
            (Hint, "GPU 2: may take 300 W, of 700 W"),
            (Hint, "GPU 2: is slowed down by heat"),
            (Fine, "GPU 3: NVIDIA GeForce RTX 4090"),
            (Hint, "GPUs 0 and 3: cannot read"),
            (Hint, "GPUs 1 and 3: cannot read"),
        ] {
            let is_said =
                |(found, text): &(_, String)| *found == severity && text.starts_with(words);
            assert!(said.iter().any(is_said), "{words}: {said:?}");
        }
        assert_eq!(said.len(), 9);
        assert!(
            found
                .iter()
                .all(|one| one.fix.is_some() == (one.severity != Fine))
        );
    }

    #[test]
    fn gpus_that_reach_each_other_are_one_line_and_a_machine_without_has_none() {
        let alone = examine(Some(NvidiaGpus {
            cuda: (12, 8),
            gpus: vec![h200()],
            apart: Some(Vec::new()),
        }));
        assert_eq!(alone.len(), 1);
        let two = examine(Some(NvidiaGpus {
            cuda: (12, 8),
            gpus: vec![h200(), h200()],
            apart: Some(Vec::new()),
        }));
        assert_eq!(
            two.last().unwrap().message,
            "all 2 reach each other's memory"
        );
        let unknown = examine(Some(NvidiaGpus {
            cuda: (12, 8),
            gpus: vec![h200(), h200()],
            apart: None,
        }));
        assert_eq!(unknown.len(), 2, "nothing is said of what nobody knows");
        assert!(examine(None).is_empty());
    }
}
