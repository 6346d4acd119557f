//! The device that a plan is made for, as far as its memory and its speed go.

use kernels::{Device, DeviceKind, cuda::Gpu};
use run_config::RunConfig;

use super::{
    PlanGpu, PlannedDevice,
    cpu_speed::CpuSpeed,
    gpu_table::GpuSpec,
    interconnect::{Interconnect, LOOPBACK, Network, PCIE_4},
    speed::SpeedModel,
    this_machine::{Machine, cpu_name},
    workload::Workload,
};
use crate::{
    device::{self, GpuMemory, GpuVersions, Refusal, refusal, resolve_recipe},
    engine::StepOf,
    error::{Result, TrainerError},
    ranks::RankInfo,
};

/// The device that a plan is made for.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum PlanTarget {
    /// This machine's CPU, and its matmul speed where it was measured.
    Cpu(Option<CpuSpeed>),
    /// A GPU of this machine.
    Gpu(GpuMemory),
    /// A GPU that is not here.
    Named(&'static GpuSpec),
    /// The GPU that the 1 B presets are made for, taken because the run needs one and there is none here.
    Assumed(&'static GpuSpec),
}

impl PlanTarget {
    /// Chooses the GPU that was asked for; else the device that the run is meant for: the GPU that it names or finds,
    /// one that is assumed if it is meant for a GPU and there is none here, else the CPU.
    ///
    /// # Errors
    /// [`TrainerError::Request`] where a GPU is named and the model needs a CPU.
    pub(super) fn choose(config: &RunConfig, requested_gpu: Option<PlanGpu>, machine: &impl Machine) -> Result<Self> {
        if let Some(PlanGpu::Named(gpu)) = requested_gpu {
            return match refusal(config, gpu.into())? {
                None => Ok(Self::Named(gpu)),
                Some(Refusal { clause, way_out, .. }) => {
                    let message = format!("--gpu {}: it cannot take this run: a GPU {clause}. {way_out}", gpu.key);
                    Err(TrainerError::Request(message))
                }
            };
        }
        let stays_here = requested_gpu == Some(PlanGpu::This);
        let device = config.runtime.device;
        let gpus = if device == run_config::Device::Cpu { Vec::new() } else { machine.gpus() };
        let usable = |ordinal| gpus.iter().find(|gpu: &&Gpu| gpu.ordinal == ordinal && gpu.refusal().is_none());
        let gpu_target = |ordinal| usable(ordinal).map(|gpu| Self::Gpu(machine.look_at(gpu)));
        let assumed = Self::Assumed(GpuSpec::rtx_5090());
        let ordinal = if let run_config::Device::Cuda(ordinal) = device { ordinal } else { 0 };
        let versions = usable(ordinal).map_or_else(|| GpuSpec::rtx_5090().into(), GpuVersions::from);
        let cpu = || machine.matmul_speed(config).map(|speed| Self::Cpu(Some(speed)));
        match (device, refusal(config, versions)?) {
            (run_config::Device::Cpu, _) => cpu(),
            (run_config::Device::Auto, Some(refusal)) if refusal.is_for_cpu || usable(0).is_none() => cpu(),
            (_, Some(refusal)) => Err(TrainerError::Request(device::refused(device, &refusal))),
            (run_config::Device::Cuda(ordinal), None) => match gpu_target(ordinal) {
                None if stays_here => Err(TrainerError::Request(format!(
                    "--gpu this: there is no usable GPU {device} here, and runtime.device asks for one. Name a GPU, as in \
                     `--gpu rtx5090`, or add `--override runtime.device=cpu`"
                ))),
                target => Ok(target.unwrap_or(assumed)),
            },
            (run_config::Device::Auto, None) => match gpu_target(0) {
                Some(target) => Ok(target),
                None if stays_here => cpu(),
                None => {
                    let speed = machine.matmul_speed(config)?;
                    let too_long = Workload::new(config)?.is_too_long_for_cpu(speed);
                    Ok(if too_long { assumed } else { Self::Cpu(Some(speed)) })
                }
            },
        }
    }

    /// The target for an open device; a CPU's speed is not measured.
    pub(super) fn open(device: &Device) -> Result<Self> {
        match device {
            Device::Cpu => Ok(Self::Cpu(None)),
            Device::Cuda(gpu) => Ok(Self::Gpu(GpuMemory::now(gpu)?)),
        }
    }

    pub(super) fn kind(&self) -> DeviceKind {
        match self {
            Self::Cpu(_) => DeviceKind::Cpu,
            Self::Gpu(_) | Self::Named(_) | Self::Assumed(_) => DeviceKind::Cuda,
        }
    }

    /// The GPU's entry of the table; none for a CPU, and for a GPU that is not in the table.
    pub(super) fn spec(&self) -> Option<&'static GpuSpec> {
        match self {
            Self::Cpu(_) => None,
            Self::Gpu(gpu) => GpuSpec::find(&gpu.name, gpu.total),
            Self::Named(spec) | Self::Assumed(spec) => Some(spec),
        }
    }

    /// The config of a run on the device: with the fp8 matmuls that it has.
    pub(super) fn resolve(&self, config: &RunConfig) -> RunConfig {
        let mut config = config.clone();
        resolve_recipe(
            &mut config,
            match self {
                Self::Cpu(_) => None,
                Self::Gpu(gpu) => Some(gpu.versions),
                Self::Named(spec) | Self::Assumed(spec) => Some((*spec).into()),
            },
        );
        config
    }

    /// The name for people: `RTX 5090`, or a CPU with its threads.
    pub(super) fn name(&self, machine: &impl Machine) -> String {
        match self {
            Self::Cpu(None) => "this machine's CPU".to_owned(),
            Self::Cpu(Some(speed)) => cpu_name(machine, speed.threads),
            Self::Gpu(gpu) => gpu.name.clone(),
            Self::Named(spec) | Self::Assumed(spec) => spec.name.to_owned(),
        }
    }

    /// Describes the device for the plan.
    pub(super) fn described(&self, machine: &impl Machine) -> PlannedDevice {
        let spec = self.spec().copied();
        let (memory_bytes, bf16_flops) = match self {
            Self::Cpu(_) => (None, None),
            Self::Gpu(gpu) => (Some(gpu.total), gpu.peak),
            Self::Named(spec) | Self::Assumed(spec) => (Some(spec.memory_bytes), Some(spec.bf16_flops())),
        };
        let is_assumed = matches!(self, Self::Assumed(_));
        PlannedDevice { name: self.name(machine), memory_bytes, bf16_flops, gpu: spec, assumed: is_assumed }
    }

    /// Connects a model's speeds to a network of several ranks, each on a GPU like this or all on this CPU. The link of
    /// a GPU that is not in the table is taken for PCIe 4.0.
    pub(super) fn connect(
        &self,
        model: SpeedModel,
        rank_info: RankInfo,
        interconnect: Option<Interconnect>,
    ) -> SpeedModel {
        if rank_info.world_size == 1 {
            return model;
        }
        let link = match self.kind() {
            DeviceKind::Cpu => LOOPBACK,
            DeviceKind::Cuda => self.spec().map_or(PCIE_4, |gpu| gpu.link),
        };
        let nodes = rank_info.world_size / rank_info.local_world_size;
        model.connected_by(Network::new(link, nodes, interconnect))
    }

    /// Returns a model that predicts speeds on the device; none on a CPU on which nothing was measured and nothing may
    /// be timed, and on a GPU of unknown speed.
    pub(super) fn speed_model(
        &self,
        step: StepOf<'_>,
        machine: &impl Machine,
        may_time: bool,
    ) -> Result<Option<SpeedModel>> {
        let measured = match self {
            Self::Cpu(Some(_)) | Self::Gpu(_) => machine.measured(step, &self.name(machine)),
            _ => None,
        };
        let model = match (self, measured) {
            (Self::Cpu(None), _) => None,
            (Self::Cpu(Some(speed)), Some(measured)) => {
                Some(SpeedModel::unscaled_cpu(speed.flops).measured(&measured, step))
            }
            (Self::Cpu(Some(_)), None) if !may_time => None,
            (Self::Cpu(Some(speed)), None) => {
                let load = machine.load().filter(|load| *load > speed.threads as f64);
                let model = match machine.calibrate(step, *speed)? {
                    Some(calibration) => SpeedModel::of_cpu(speed.flops, calibration, step),
                    None => SpeedModel::of_untimed_cpu(speed.flops),
                };
                Some(model.under_load(load))
            }
            (Self::Gpu(gpu), Some(measured)) => {
                let model = SpeedModel::of_gpu(gpu, step.config);
                Some(model.unwrap_or_else(|| SpeedModel::of_unknown_gpu(step.config)).measured(&measured, step))
            }
            (Self::Gpu(gpu), None) => SpeedModel::of_gpu(gpu, step.config),
            (Self::Named(spec) | Self::Assumed(spec), _) => Some(SpeedModel::of_spec(spec, step.config)),
        };
        Ok(model)
    }
}
