//! Formats a plan for the terminal.

use std::fmt;

use super::choices::why_no_cudnn;
use super::figures::{Digits, Of, Seconds};
use super::{Hardware, InputsIn, Plan};
use crate::computation::AttentionKernel;
use crate::config::{DeviceChoice, RunSettings, Tier};
use offload_support::units::ApproxBytes;

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.model_line(f)?;
        self.host_line(f)?;
        self.gpu_line(f)?;
        self.device_lines(f)?;
        if let Some(line) = self.inputs_line() {
            write!(f, "\n{line}")?;
        }
        if self.nodes() > 1 {
            write!(
                f,
                "\n{}; figures above are for one node",
                self.network_line()
            )?;
        }
        if let Some(line) = self.sequence_line() {
            write!(f, "\n{line}")?;
        }
        if let Some(directions) = &self.directions {
            write!(f, "\n{directions}")?;
        }
        self.bound_lines(f)?;
        write!(f, "\n{}", self.outlook())?;
        if let Some(checkpoints) = &self.checkpoints {
            write!(f, "\n{checkpoints}")?;
        }
        for system in &self.space {
            write!(f, "\n{system}")?;
        }
        for choice in self.choices() {
            write!(
                f,
                "\nchosen    {} = {}: {}",
                choice.key, choice.value, choice.why
            )?;
        }
        if let Some(note) = &self.fp8_note {
            write!(f, "\n{note}")?;
        }
        for problem in self.problems() {
            write!(f, "\nrefused   {problem}")?;
        }
        Ok(())
    }
}

impl Plan {
    /// Formats what a person checks before a run starts, a line each: where state is kept, memory, the shortest step
    /// and what limits it, and wear of the drives.
    pub fn overview(&self, settings: &RunSettings) -> Vec<String> {
        let placement = &settings.placement;
        let kept = |tier: Tier| match tier {
            Tier::Nvme => "drives",
            Tier::None | Tier::Cpu if self.lives_in_gpu() => "GPU memory",
            Tier::None | Tier::Cpu if self.in_gpu.contains(&true) => "GPU and host memory",
            Tier::None | Tier::Cpu => "host memory",
        };
        let (param, optimizer) = (kept(placement.param), kept(placement.optimizer));
        let mut state = match param == optimizer {
            true => format!("state     in {param}"),
            false => format!("state     parameters in {param}, optimizer state in {optimizer}"),
        };
        state = state.replace("in drives", "on drives");
        if self.device_bytes() > 0 {
            state += &format!(", {}", ApproxBytes(self.device_bytes()));
            let dirs = placement.nvme_paths.iter();
            let dirs: Vec<String> = dirs.map(|dir| dir.display().to_string()).collect();
            match dirs.as_slice() {
                [] => state += " with the daemon of offload.socket",
                [dir] => state += &format!(" in {dir}"),
                dirs => {
                    let file_bytes = ApproxBytes(self.device_file_bytes(dirs.len() as u64));
                    state += &format!(" in {}, a file of {file_bytes} in each", dirs.join(", "));
                }
            }
            if self.in_gpu.contains(&true) {
                state += &format!(
                    "; {:.2} of it in GPU memory, of which every commit writes {}",
                    self.gpu_fraction(),
                    ApproxBytes(self.gpu_tiles.param_bytes + self.gpu_tiles.state_bytes)
                );
            }
        }
        let mut memory = format!("memory    host {}", ApproxBytes(self.host_bytes()));
        if let Some(bytes) = self.hardware.host_memory_bytes {
            memory += &format!(" of {}", ApproxBytes(bytes));
        }
        match &self.hardware.gpu {
            Some(gpu) => {
                memory += &format!(
                    ", GPU {} of {} ({})",
                    ApproxBytes(self.gpu_bytes()),
                    ApproxBytes(gpu.memory_bytes),
                    gpu.name
                );
            }
            // Which libraries were looked for matters only to those who expect a GPU: `gpu_line` lists them.
            None if settings.train.device == DeviceChoice::Auto => memory += "; no GPU was found",
            None => memory += &format!("; no GPU: {}", self.hardware.no_gpu),
        }
        if self.local_ranks > 1 {
            memory += &format!(", in each of {} processes", self.local_ranks);
        }
        let mut lines = vec![state, memory];
        lines.extend(self.inputs_line());
        lines.extend((self.nodes() > 1).then(|| self.network_line()));
        lines.extend(self.sequence_line());
        lines.extend(self.attention_line(settings));
        lines.extend(self.fp8_note.clone());
        if self.steps > 0 {
            lines.push(format!(
                "step      about {} ({:.0} tokens/s), bottleneck: {}",
                Seconds(self.bound.s),
                self.tokens as f64 / self.bound.s,
                self.bound.wall.word()
            ));
            lines.extend(self.outlook().to_string().lines().map(str::to_owned));
        }
        lines
    }

    /// Kernels of attention on a GPU, their part of the computing time, and what results that do not repeat give.
    fn attention_line(&self, settings: &RunSettings) -> Option<String> {
        self.hardware.gpu.as_ref()?;
        let (by, why) = match self.attention_used(settings) {
            AttentionKernel::Cudnn => ("cuDNN's kernels", None),
            AttentionKernel::Torch if self.attention == AttentionKernel::Cudnn => {
                let why = "cuDNN's are slower for short documents".to_owned();
                ("torch's kernels", Some(why))
            }
            AttentionKernel::Torch => ("torch's kernels", why_no_cudnn(settings, &self.hardware)),
        };
        let why = why.map_or(String::new(), |why| format!(" ({why})"));
        let share = self.attention_s / self.compute_s();
        let mut line = format!(
            "attention by {by}{why}, {:.0} % of the computing time",
            100.0 * share
        );
        if !settings.train.deterministic {
            let matmuls = settings.train.matmuls;
            let exact = self.times_with(settings, true, matmuls).sum();
            let free = self.times_with(settings, false, matmuls).sum();
            line += &format!(
                "; train.deterministic = false: computing takes about {:.0} % less time, and results differ from run to run",
                100.0 * (1.0 - free / exact)
            );
        }
        Some(line)
    }

    /// What block inputs on drives take.
    fn inputs_line(&self) -> Option<String> {
        if self.inputs_in != InputsIn::Drives {
            return None;
        }
        let (bytes, hardware) = (self.node_bytes.scratch_written_bytes, &self.hardware);
        Some(format!(
            "inputs    of blocks on drives, {}; a step writes {} in at least {} and reads as much in {}",
            ApproxBytes(self.device_input_bytes()),
            ApproxBytes(bytes as u64),
            Seconds(bytes / hardware.write_bytes_per_s.value),
            Seconds(bytes / hardware.read_bytes_per_s.value),
        ))
    }

    /// Where the nodes have the parameters, and what they send.
    fn network_line(&self) -> String {
        let held = match self.copy_bytes {
            0 if !self.stage.divides_parameters() => {
                "each rank holds all parameters from forward to backward".to_owned()
            }
            0 => format!(
                "the parameters are divided over all nodes ({})",
                self.why_no_copy()
            ),
            _ => format!(
                "each node keeps a copy of all parameters in host memory, {}",
                ApproxBytes(self.node_copy_bytes())
            ),
        };
        format!(
            "network   {held}; each of {} nodes sends and receives {} a step",
            self.nodes(),
            ApproxBytes(self.network_bytes)
        )
    }

    /// How ranks divide each sequence, and what they send each other for it.
    fn sequence_line(&self) -> Option<String> {
        let ranks = self.sequence_ranks;
        let bytes = self.exchange.sum_bytes();
        let s = self.exchange_s(bytes);
        let takes = match s > 0.0 {
            true => format!(", which takes about {}", Seconds(s)),
            false => String::new(),
        };
        (ranks > 1).then(|| {
            format!(
                "sequence  on {ranks} ranks, {} of {} tokens on each; each sends {} a step to the others{takes}",
                self.seq_len / ranks as usize,
                self.seq_len,
                ApproxBytes(bytes)
            )
        })
    }

    fn model_line(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "model     {:.2} M parameters in {} units, {} tiles of {} elements",
            self.params_count as f64 / 1e6,
            self.units.len(),
            self.memory.table_count,
            self.swapper.tile_elems
        )
    }

    fn host_line(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "\nhost      {}: resident tiles {}, staging {}, gradients {}",
            ApproxBytes(self.host_bytes()),
            ApproxBytes(self.host_resident_bytes()),
            ApproxBytes(self.memory.staging_bytes()),
            ApproxBytes(self.host_grad_bytes()),
        )?;
        if self.hardware.gpu.is_none() {
            self.compute_parts(f)?;
        } else if self.compute.away_bytes > 0 {
            write!(f, ", block inputs {}", ApproxBytes(self.compute.away_bytes))?;
        }
        if self.inputs_in == InputsIn::Drives {
            let bytes = ApproxBytes(self.memory.scratch_slot_bytes());
            write!(f, ", block inputs in transit {bytes}")?;
        }
        if self.copy_bytes > 0 {
            let bytes = ApproxBytes(self.copy_bytes);
            write!(f, ", part of the node's copy of the parameters {bytes}")?;
        }
        for (what, bytes) in [
            ("tiles to and from the GPU", self.gpu_staging_bytes()),
            ("checkpoint copies", self.checkpoint_buffer_bytes()),
        ] {
            if bytes > 0 {
                write!(f, ", {what} {}", ApproxBytes(bytes))?;
            }
        }
        if self.local_ranks > 1 {
            let (all, ranks) = (ApproxBytes(self.node_host_bytes()), self.local_ranks);
            write!(f, "; all {ranks} processes of the node {all}")?;
        }
        Ok(())
    }

    fn compute_parts(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let compute = &self.compute;
        for (what, bytes) in [
            ("unit buffers", compute.unit_buffer_bytes),
            ("gradient buffers", compute.grad_buffer_bytes),
            ("gradient sums", compute.gradient_sum_bytes),
            ("activations", compute.activation_bytes),
            ("kept besides", compute.kept_bytes),
            ("computing", compute.working_bytes),
            ("streamed tiles", compute.update_bytes),
            ("libraries", compute.context_bytes),
        ] {
            if bytes > 0 {
                write!(f, ", {what} {}", ApproxBytes(bytes))?;
            }
        }
        Ok(())
    }

    fn gpu_line(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(gpu) = &self.hardware.gpu else {
            return write!(f, "\nGPU       none: {}", self.hardware.no_gpu);
        };
        write!(
            f,
            "\nGPU       {} of {} ({}): tiles {}",
            ApproxBytes(self.gpu_bytes()),
            ApproxBytes(gpu.memory_bytes),
            gpu.name,
            ApproxBytes(self.gpu_tiles.sum_bytes())
        )?;
        self.compute_parts(f)
    }

    fn device_lines(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.device_bytes() == 0 {
            return write!(f, "\ndevices   none");
        }
        let bytes = self.node_bytes;
        let (mut area, mut read, mut written) = (String::new(), String::new(), String::new());
        if self.inputs_in == InputsIn::Drives {
            let input_bytes = ApproxBytes(self.device_input_bytes());
            area = format!(", {input_bytes} of it for block inputs");
            let moved = ApproxBytes(bytes.scratch_written_bytes as u64);
            read = format!(", block inputs {moved}");
            written = format!(" (block inputs {moved})");
        }
        write!(
            f,
            "\ndevices   {} for both generations of tiles{area}\na step    reads {} (forward {}, backward {}, update {}{read}), writes {}{written}",
            ApproxBytes(self.device_bytes()),
            ApproxBytes(bytes.all_read_bytes() as u64),
            ApproxBytes(bytes.forward_read_bytes as u64),
            ApproxBytes(bytes.backward_read_bytes as u64),
            ApproxBytes(bytes.update_read_bytes as u64),
            ApproxBytes(bytes.all_written_bytes() as u64)
        )
    }

    fn bound_lines(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bound = &self.bound;
        let tokens_per_s = self.tokens as f64 / bound.s;
        let tflops = self.step_operations() / bound.s / 1e12;
        write!(
            f,
            "\nbound     {} a step, {tokens_per_s:.0} tokens/s, {} TFLOPS, limited by {}; update on {}",
            Seconds(bound.s),
            Digits(tflops),
            bound.wall.word(),
            self.optimizer_device.name(),
        )?;
        for (n, term) in bound.terms.iter().filter(|term| term.s > 0.0).enumerate() {
            let lead = if n == 0 { "\nterms     " } else { ", " };
            write!(f, "{lead}{} {}", term.what, Seconds(term.s))?;
        }
        write!(f, "\nfor       ")?;
        self.hardware.rates(f, self.device_bytes() > 0)?;
        match self.nodes() {
            1 => Ok(()),
            _ => write!(
                f,
                ", network {}",
                Of(&self.hardware.network_bytes_per_s, 1e9, "GB/s")
            ),
        }
    }
}

impl Hardware {
    /// Formats all rates.
    fn rates(&self, f: &mut fmt::Formatter<'_>, with_devices: bool) -> fmt::Result {
        write!(f, "{}", Of(&self.tflops, 1.0, "TFLOPS"))?;
        if let Some(gpu) = &self.gpu {
            write!(f, ", bus {}", Of(&gpu.bus_bytes_per_s, 1e9, "GB/s"))?;
        }
        if with_devices {
            write!(
                f,
                ", devices reading {} and writing {}",
                Of(&self.read_bytes_per_s, 1e9, "GB/s"),
                Of(&self.write_bytes_per_s, 1e9, "GB/s")
            )?;
        }
        write!(
            f,
            ", updating {}",
            Of(&self.update_params_per_s, 1e9, "G parameters/s")
        )
    }
}

impl fmt::Display for Hardware {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "machine   ")?;
        match &self.gpu {
            Some(gpu) => write!(f, "GPU of {} ({})", ApproxBytes(gpu.memory_bytes), gpu.name)?,
            None => write!(f, "no GPU ({})", self.no_gpu)?,
        }
        match self.host_memory_bytes {
            Some(bytes) => write!(
                f,
                ", host memory {} ({})",
                ApproxBytes(bytes),
                self.host_memory_source.word()
            )?,
            None => write!(f, ", host memory unknown")?,
        }
        write!(f, "\nfor       ")?;
        self.rates(f, true)
    }
}
