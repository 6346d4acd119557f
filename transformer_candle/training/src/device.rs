//! Which device a run computes on: the one place where `auto`, `cpu` and `cuda:N` become a device.
//!
//! A CPU run needs no CUDA library: the GPUs are looked for only where a GPU could be meant.

mod fp8;
mod gpu_memory;
mod of_rank;

use std::path::Path;

use kernels::{
    Device, HeadLayout,
    cuda::{Gpu, limits},
};
use model::ModelShape;
use run_config::{ResolvedRun, RunConfig};

pub(crate) use self::fp8::{resolve_recipe, scale_block};
pub use self::{
    fp8::{GpuVersions, fp8_recipes},
    gpu_memory::GpuMemory,
};
use crate::{
    engine::model_shape,
    error::{Result, TrainerError},
    ranks::RankInfo,
    units::bytes,
};

/// Files that show that there is a GPU: the driver's device file on Linux, Windows' driver library under WSL.
const DRIVER_FILES: [&str; 2] = ["/dev/nvidia0", "/usr/lib/wsl/lib/libcuda.so.1"];

/// An open device, and notes for people on the choice.
#[derive(Clone, Debug)]
pub struct DeviceSelection {
    /// The open device.
    pub device: Device,
    /// Notes on the choice, one sentence each.
    pub notes: Vec<String>,
}

/// The GPUs that this program can use, or the one sentence that says what is missing.
pub fn gpus() -> std::result::Result<Vec<Gpu>, String> {
    kernels::cuda::probe()
}

/// The driver's identifier of a GPU that is open; none for a CPU.
pub(crate) fn gpu_uuid(device: &Device) -> Option<String> {
    let ordinal = device.as_cuda()?.ordinal();
    gpus().ok()?.into_iter().find(|gpu| gpu.ordinal == ordinal).map(|gpu| gpu.uuid)
}

/// Opens a device; `auto` is the first GPU if there is one, else the CPU.
///
/// # Errors
/// [`TrainerError::Request`] if a GPU is named that is not there.
pub fn open(requested_device: run_config::Device) -> Result<Device> {
    let decision = AvailableGpus::for_request(requested_device).decide(requested_device, |_| Ok(None))?;
    open_decided(decision.device)
}

/// Chooses and opens the device that a rank of a run is trained on, holds it to `runtime.memory_limit` and
/// `runtime.deterministic`, and writes it into the config, with the fp8 matmuls that it has.
///
/// # Errors
/// [`TrainerError::Request`] if a GPU is named that is not there, or that does not take the model, or if there are fewer
/// than ranks.
pub fn select_for_training(run: &mut ResolvedRun, rank_info: RankInfo) -> Result<DeviceSelection> {
    let requested_device = run.config.runtime.device;
    let gpus = AvailableGpus::for_request(requested_device);
    let decision = gpus.decide(requested_device, |gpu| refusal(&run.config, gpu.into()))?;
    let decision = gpus.of_rank(decision, rank_info)?;
    let gpu = gpus.named(decision.device);
    // That of a rank may be another one than was decided on.
    if let Some(refusal) = gpu.map_or(Ok(None), |gpu| refusal(&run.config, gpu.into()))? {
        return Err(TrainerError::Request(refused(decision.device, &refusal)));
    }
    let device = open_decided(decision.device)?;
    if let (Device::Cuda(gpu), Some(limit)) = (&device, run.config.runtime.memory_limit) {
        gpu.set_memory_limit(limit.bytes());
    }
    if let Device::Cuda(gpu) = &device {
        gpu.set_deterministic(run.config.runtime.deterministic);
    }
    run.config.runtime.device = decision.device;
    let fp8_note = resolve_recipe(&mut run.config, gpu.map(GpuVersions::from));
    Ok(DeviceSelection { device, notes: decision.note.into_iter().chain(fp8_note).collect() })
}

/// Chooses and opens the device that a trained model is used on, for which it needs `bytes` bytes. With `auto` a GPU
/// that has not so much left, beside a training for example, is left alone.
///
/// # Errors
/// As [`select_for_training`].
pub fn select_for_inference(
    requested_device: run_config::Device,
    shape: &ModelShape,
    needed_bytes: impl FnOnce(&Device) -> u64,
) -> Result<DeviceSelection> {
    let decision = AvailableGpus::for_request(requested_device)
        .decide(requested_device, |_| Ok(limits::refusal(&sizes(shape, 0)).map(Refusal::of_sizes)))?;
    let mut notes: Vec<String> = decision.note.into_iter().collect();
    let outcome = open_decided(decision.device);
    if requested_device != run_config::Device::Auto || decision.device == run_config::Device::Cpu {
        return Ok(DeviceSelection { device: outcome?, notes });
    }
    let room = outcome.and_then(|device| {
        let free = match &device {
            Device::Cpu => None,
            Device::Cuda(gpu) => GpuMemory::now(gpu)?.free,
        };
        Ok((needed_bytes(&device), free, device))
    });
    match room {
        Ok((needed_bytes, Some(free), _)) if needed_bytes > free => {
            let (needed_bytes, free) = (bytes(needed_bytes), bytes(free));
            notes.push(format!("on the CPU: {} has {free} free, and the model needs {needed_bytes}", decision.device));
            Ok(DeviceSelection { device: Device::Cpu, notes })
        }
        Ok((_, _, device)) => Ok(DeviceSelection { device, notes }),
        Err(problem) => {
            notes.push(format!("on the CPU: {problem}"));
            Ok(DeviceSelection { device: Device::Cpu, notes })
        }
    }
}

/// Describes a device: its name and, on a GPU, what results depend on.
pub fn describe(device: &Device) -> String {
    device.as_cuda().map_or_else(|| device.to_string(), |cuda| format!("{device}: {}", cuda.fingerprint()))
}

/// Why no GPU trains a run, and what would change that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// A clause that follows "a GPU".
    pub clause: String,
    /// An imperative that precedes "or take `--device cpu`".
    pub way_out: &'static str,
    /// Whether `auto` is the CPU then. A setting that is chosen for a GPU's speed is of no use there.
    pub is_for_cpu: bool,
}

impl Refusal {
    /// That of a model whose sizes the kernels do not support.
    fn of_sizes(clause: String) -> Self {
        Self { clause, way_out: "Change the model's sizes", is_for_cpu: true }
    }
}

/// Returns why a GPU does not train a config's run; none where it does.
pub fn refusal(config: &RunConfig, gpu: GpuVersions) -> Result<Option<Refusal>> {
    let of_model = limits::refusal(&sizes(&model_shape(config)?, config.longest_sequence()));
    of_model.map_or_else(|| fp8::refusal(config, gpu), |clause| Ok(Some(Refusal::of_sizes(clause))))
}

/// The error message for a GPU that was requested, or found by `auto`, and does not train the run.
pub(crate) fn refused(requested_device: run_config::Device, refusal: &Refusal) -> String {
    let Refusal { clause, way_out, .. } = refusal;
    format!(
        "this run does not train on the device asked for, {requested_device}: a GPU {clause}. {way_out}, or take `--device \
         cpu`"
    )
}

fn sizes(shape: &ModelShape, sequence_length: usize) -> limits::ModelSizes {
    let ModelShape { hidden_size, intermediate_size, max_position_embeddings, .. } = *shape;
    let heads: HeadLayout = shape.heads();
    limits::ModelSizes {
        hidden_size,
        intermediate_size,
        heads,
        has_qkv_bias: shape.architecture.has_qkv_bias(),
        positions: max_position_embeddings.max(sequence_length),
    }
}

fn open_decided(device: run_config::Device) -> Result<Device> {
    match device {
        run_config::Device::Auto | run_config::Device::Cpu => Ok(Device::Cpu),
        run_config::Device::Cuda(ordinal) => Ok(Device::cuda(ordinal)?),
    }
}

/// The GPUs of this machine.
struct AvailableGpus {
    /// The GPUs, or a sentence that says what is missing.
    gpus: std::result::Result<Vec<Gpu>, String>,
    /// Whether the system shows a GPU, whatever this program can do with it.
    has_driver_files: bool,
}

/// The device that was chosen, with a note if it is not the one that a person would expect.
#[derive(Debug, PartialEq)]
struct Decision {
    device: run_config::Device,
    note: Option<String>,
}

impl AvailableGpus {
    fn for_request(requested_device: run_config::Device) -> Self {
        if requested_device == run_config::Device::Cpu {
            return Self { gpus: Ok(Vec::new()), has_driver_files: false };
        }
        Self { gpus: gpus(), has_driver_files: DRIVER_FILES.iter().any(|path| Path::new(path).exists()) }
    }

    /// The GPU that a device is; none for the CPU.
    fn named(&self, device: run_config::Device) -> Option<&Gpu> {
        let run_config::Device::Cuda(ordinal) = device else { return None };
        self.gpus.iter().flatten().find(|gpu| gpu.ordinal == ordinal)
    }

    /// Chooses the device; `refusal` returns why a GPU does not train the run.
    fn decide(
        &self,
        requested_device: run_config::Device,
        refusal: impl Fn(&Gpu) -> Result<Option<Refusal>>,
    ) -> Result<Decision> {
        match requested_device {
            run_config::Device::Cpu => Ok(Decision { device: requested_device, note: None }),
            run_config::Device::Auto => self.best(refusal),
            run_config::Device::Cuda(_) => {
                let problem = match (&self.gpus, self.named(requested_device)) {
                    (Err(problem), _) => Some(format!("the device asked for is {requested_device}: {problem}")),
                    (Ok(gpus), None) => Some(absent(requested_device, gpus)),
                    (Ok(_), Some(gpu)) => match gpu.refusal() {
                        None => refusal(gpu)?.map(|refusal| refused(requested_device, &refusal)),
                        problem => problem,
                    },
                };
                problem.map_or(Ok(Decision { device: requested_device, note: None }), |problem| {
                    Err(TrainerError::Request(problem))
                })
            }
        }
    }

    /// Resolves `auto`: the first GPU, or the CPU with the reason if there is an unsupported GPU.
    fn best(&self, refusal: impl Fn(&Gpu) -> Result<Option<Refusal>>) -> Result<Decision> {
        if let Err(problem) = &self.gpus {
            let note = format!("on the CPU, although this machine has an NVIDIA GPU: {problem}");
            return Ok(Decision { device: run_config::Device::Cpu, note: self.has_driver_files.then_some(note) });
        }
        let Some(gpu) = self.named(run_config::Device::Cuda(0)) else {
            return Ok(Decision { device: run_config::Device::Cpu, note: None });
        };
        let problem = match (gpu.refusal(), refusal(gpu)?) {
            (None, None) => return Ok(Decision { device: run_config::Device::Cuda(0), note: None }),
            (None, Some(refusal)) if !refusal.is_for_cpu => {
                return Err(TrainerError::Request(refused(run_config::Device::Auto, &refusal)));
            }
            (None, Some(Refusal { clause, .. })) => format!("there is {}, and for this model a GPU {clause}", gpu.name),
            (Some(problem), _) => problem,
        };
        Ok(Decision { device: run_config::Device::Cpu, note: Some(format!("on the CPU: {problem}")) })
    }
}

fn absent(requested_device: run_config::Device, gpus: &[Gpu]) -> String {
    let gpus: Vec<String> = gpus.iter().map(|gpu| format!("cuda:{} ({})", gpu.ordinal, gpu.name)).collect();
    format!("the device asked for is {requested_device}, and this machine has {}", gpus.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use run_config::Device::{Auto, Cpu, Cuda};

    const MISSING: &str = "there is no NVIDIA driver (libcuda.so.1): install it";

    pub(super) fn machine(names: &[&str]) -> AvailableGpus {
        let gpu = |(ordinal, name): (usize, &&str)| Gpu {
            ordinal,
            name: (*name).to_owned(),
            uuid: String::new(),
            total_bytes: 34_190_917_632,
            compute_capability: (12, 0),
            cublas: (13, 0),
        };
        AvailableGpus { gpus: Ok(names.iter().enumerate().map(gpu).collect()), has_driver_files: true }
    }

    pub(super) fn old() -> AvailableGpus {
        let mut machine = machine(&["Tesla T4"]);
        machine.gpus.as_mut().unwrap()[0].compute_capability = (7, 5);
        machine
    }

    fn without(has_driver_files: bool) -> AvailableGpus {
        AvailableGpus { gpus: Err(MISSING.to_owned()), has_driver_files }
    }

    fn of_sizes(clause: &str) -> Refusal {
        Refusal::of_sizes(clause.to_owned())
    }

    fn decided(
        machine: &AvailableGpus,
        requested_device: run_config::Device,
        refusal: Option<&str>,
    ) -> (run_config::Device, Option<String>) {
        let Decision { device, note } = machine.decide(requested_device, |_| Ok(refusal.map(of_sizes))).unwrap();
        (device, note)
    }

    fn refused(machine: &AvailableGpus, requested_device: run_config::Device, refusal: Option<&str>) -> String {
        let error = machine.decide(requested_device, |_| Ok(refusal.map(of_sizes))).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        error.to_string()
    }

    #[test]
    fn auto_selects_the_first_gpu_or_the_cpu() {
        assert_eq!(decided(&machine(&["RTX 5090", "RTX 3060"]), Auto, None), (Cuda(0), None));
        assert_eq!(decided(&machine(&[]), Auto, None), (Cpu, None));
        assert_eq!(decided(&without(false), Auto, None), (Cpu, None), "an ordinary machine needs no note");
    }

    #[test]
    fn an_unused_gpu_is_explained() {
        let (device, note) = decided(&without(true), Auto, None);
        assert_eq!((device, note.unwrap().ends_with(MISSING)), (Cpu, true));
        let (device, note) = decided(&machine(&["RTX 5090"]), Auto, Some("supports head sizes 32 to 128"));
        assert_eq!(device, Cpu);
        assert_eq!(
            note.unwrap(),
            "on the CPU: there is RTX 5090, and for this model a GPU supports head sizes 32 to 128"
        );
        let (device, note) = decided(&old(), Auto, None);
        assert_eq!((device, note.unwrap().contains("Tesla T4 has compute capability 7.5")), (Cpu, true));
    }

    #[test]
    fn a_requested_gpu_is_used_or_refused() {
        let two = machine(&["RTX 5090", "RTX 3060"]);
        assert_eq!(decided(&two, Cuda(1), None), (Cuda(1), None));
        assert!(
            refused(&two, Cuda(2), None).ends_with("cuda:2, and this machine has cuda:0 (RTX 5090), cuda:1 (RTX 3060)")
        );
        assert_eq!(refused(&without(true), Cuda(0), None), format!("the device asked for is cuda:0: {MISSING}"));
        assert!(
            refused(&two, Cuda(0), Some("supports head sizes 32 to 128"))
                .contains("a GPU supports head sizes 32 to 128. Change the model's sizes, or take `--device cpu`")
        );
        assert!(refused(&old(), Cuda(0), None).contains("Tesla T4 has compute capability 7.5"));
    }

    #[test]
    fn a_setting_for_speed_does_not_end_up_on_the_cpu_by_itself() {
        let mut config = RunConfig::default();
        config.model.vocab_size = Some(32_000);
        config.runtime.precision = run_config::Precision::Fp8;
        let refusal = |gpu: &Gpu| refusal(&config, gpu.into());
        let mut ampere = machine(&["RTX 3090"]);
        ampere.gpus.as_mut().unwrap()[0].compute_capability = (8, 6);
        for device in [Auto, Cuda(0)] {
            assert_eq!(machine(&["RTX 5090"]).decide(device, refusal).unwrap().device, Cuda(0));
            let error = ampere.decide(device, refusal).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains("Use `--precision bf16`, or take `--device cpu`"), "{error}");
        }
        for machine in [machine(&[]), old()] {
            assert_eq!(machine.decide(Auto, refusal).unwrap().device, Cpu);
        }
    }

    #[test]
    fn a_requested_cpu_needs_no_note() {
        assert_eq!(decided(&machine(&["RTX 5090"]), Cpu, Some("takes nothing")), (Cpu, None));
        assert_eq!(decided(&AvailableGpus::for_request(Cpu), Cpu, None), (Cpu, None));
    }
}
