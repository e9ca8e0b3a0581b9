//! Keys of `offloadd` in the package's settings whose values are words or in a range.

use crate::resolve::optimizer::{master, moments};
use crate::resolve::{Faults, at_least, bytes, fraction, value, word};
use crate::toml::PackageToml;

/// Bytes of a unit above which the experts of a layer are divided: a GPU holds four such units and their gradients, and transfers are long.
const UNIT_BYTES_MAX: u64 = 512 << 20;

/// The values of `offloadd` that are words or in a range.
pub(super) struct Choices {
    pub(super) optimizer_step: &'static str,
    pub(super) resident_fraction: f64,
    pub(super) gradients: Option<&'static str>,
    pub(super) activations: &'static str,
    pub(super) activations_bytes: u64,
    pub(super) matmuls: &'static str,
    pub(super) gpu_resident_fraction: Option<f64>,
    pub(super) shard: &'static str,
    pub(super) moments: &'static str,
    pub(super) master: &'static str,
    pub(super) staging_bytes: u64,
    pub(super) unit_bytes_max: u64,
    pub(super) optimizer_device: Option<&'static str>,
}

impl Choices {
    /// Checks the values of `config`, and adds what is wrong to `faults`.
    pub(super) fn new(config: &PackageToml, faults: &mut Faults) -> Option<Self> {
        fn one_of(
            faults: &mut Faults,
            key: &'static str,
            given: &Option<String>,
            words: &[&'static str],
        ) -> Option<&'static str> {
            let words: Vec<_> = words.iter().map(|word| (*word, *word)).collect();
            faults.collect(word(key, given.as_deref(), &words))
        }
        let (own, bf16) = (&config.offloadd, &config.bf16);
        // The first word is the default.
        let optimizer_step = one_of(
            faults,
            "offloadd.optimizer_step",
            &own.optimizer_step,
            &["deferred", "immediate"],
        );
        let optimizer_device = one_of(
            faults,
            "offloadd.optimizer_device",
            &own.optimizer_device,
            &["auto", "cpu", "gpu", "shared"],
        );
        let gradients = one_of(
            faults,
            "offloadd.gradients",
            &own.gradients,
            &["auto", "cpu", "nvme"],
        );
        let activations = activations(config, faults);
        let activations_bytes = faults.collect(bytes(
            "offloadd.activations_bytes",
            own.activations_bytes.as_ref(),
        ));
        let matmuls = one_of(faults, "offloadd.matmuls", &own.matmuls, &["dtype", "fp8"]);
        let shard = one_of(faults, "offloadd.shard", &own.shard, &["auto", "all"]);
        let moments = faults.collect(moments("offloadd.moments", &own.moments, bf16));
        let master = faults.collect(master("offloadd.master", &own.master, bf16));
        let resident_fraction = faults.collect(fraction(
            "offloadd.resident_fraction",
            own.resident_fraction.unwrap_or(0.0),
        ));
        let gpu_resident_fraction = own.gpu_resident_fraction;
        faults.collect(fraction(
            "offloadd.gpu_resident_fraction",
            gpu_resident_fraction.unwrap_or(0.0),
        ));
        let staging_bytes =
            faults.collect(bytes("offloadd.staging_bytes", own.staging_bytes.as_ref()));
        let unit_bytes_max = faults.collect(bytes(
            "offloadd.unit_bytes_max",
            own.unit_bytes_max.as_ref(),
        ));
        for (key, number) in [
            ("offloadd.commit_every", own.commit_every),
            ("offloadd.mlp_chunks", own.mlp_chunks),
            ("offloadd.loss_chunks", own.loss_chunks),
            ("offloadd.update_threads", own.update_threads),
        ] {
            faults.collect(at_least(key, number.unwrap_or(1), 1));
        }
        if let Some(program) = &own.program
            && !program.is_file()
        {
            faults.0.push(value(
                "offloadd.program",
                format!(
                    "{} is not a file: name the program offloadd, or leave the key out",
                    program.display()
                ),
            ));
        }
        let chosen = |word: &'static str| (word != "auto").then_some(word);
        Some(Self {
            optimizer_step: optimizer_step?,
            resident_fraction: resident_fraction?.get(),
            gradients: chosen(gradients?),
            activations: activations?,
            activations_bytes: activations_bytes?.unwrap_or(0),
            matmuls: matmuls?,
            gpu_resident_fraction,
            shard: shard?,
            moments: moments?.word(),
            master: master?.word(),
            staging_bytes: staging_bytes?.unwrap_or(0),
            unit_bytes_max: unit_bytes_max?.unwrap_or(UNIT_BYTES_MAX),
            optimizer_device: chosen(optimizer_device?),
        })
    }
}

/// Where inputs of checkpointed blocks wait. DeepSpeed's key applies if our own is absent.
fn activations(config: &PackageToml, faults: &mut Faults) -> Option<&'static str> {
    const KEY: &str = "offloadd.activations";
    let own = config.offloadd.activations.as_deref();
    let asked = config.activation_checkpointing.cpu_checkpointing == Some(true);
    let given = own.or(asked.then_some("cpu"));
    faults.collect(word(
        KEY,
        given,
        &["gpu", "cpu", "nvme"].map(|word| (word, word)),
    ))
}
