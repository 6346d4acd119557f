//! The optimizer: clip by the global norm, then each group's update rule over its range of the flat buffers.
//!
//! The learning rate and the bias corrections are pure functions of the step's number, so the only state is what
//! [`Optimizer::state`] lists. A step whose gradient norm is not finite changes nothing; it still counts as a step. That is decided
//! where the gradients are: nothing is read back before the update is under way.

mod groups;
mod orthogonal;
mod state;

use std::ops::Range;

use kernels::{
    Buffer, DType, DeviceKind, Download, Upload,
    adamw::{self, AdamWState},
    grad_norm,
    memory::{Arena, BufferId, Category, Plan},
    timing,
};
use model::{Decoder, ParameterLayout};
use run_config::RunConfig;

pub use self::groups::{Algorithm, ParameterGroup, UpdateRule};
use self::groups::{FIRST_MOMENT, MOMENTUM, SECOND_MOMENT, in_shard, state_layouts};
pub(crate) use self::orthogonal::flops as muon_flops;
use self::orthogonal::{Batching, FlatBuffers, MuonGroup, MuonPlan};
use self::state::MASTER_LOW_BITS;
pub use self::state::{StateLayout, StateTensor};
use super::{settings::EngineSettings, sharding::shards, tree_reduction::TreeReduction};
use crate::{error::Result, ranks::RankMeter};

/// The optimizer's settings and its buffers in a memory plan.
#[derive(Clone, Debug)]
pub struct OptimizerPlan {
    algorithm: Algorithm,
    max_grad_norm: Option<f32>,
    /// The parameters that this rank updates.
    shard: Range<usize>,
    groups: Vec<ParameterGroup>,
    state: Vec<(StateLayout, BufferId)>,
    muon: Option<MuonPlan>,
    scalars: BufferId,
    /// Where a GPU receives the next step's scalars.
    scalars_staging: Option<BufferId>,
    norm: BufferId,
    outcome: BufferId,
    workspace: BufferId,
}

/// Length of the buffer that what a step did is read from; the constants below index it.
const OUTCOME: usize = 3;
const LOSS: usize = 0;
const GRAD_NORM: usize = 1;
const APPLIED: usize = 2;

impl OptimizerPlan {
    /// Adds the optimizer's buffers for weights of this layout.
    pub fn add_to(plan: &mut Plan, layout: &ParameterLayout, config: &RunConfig, settings: EngineSettings) -> Self {
        let EngineSettings { device, rank_info, .. } = settings;
        let RunConfig { runtime, optimizer: config, .. } = config;
        let precision = runtime.precision;
        // GEMMs of several matrices may round differently, and which are together depends on the number of ranks.
        let batching = match (device, runtime.deterministic_reduction) {
            (DeviceKind::Cuda, None) => Batching::UpToLargest,
            _ => Batching::Single,
        };
        let shard = shards(layout, rank_info.world_size).swap_remove(rank_info.rank);
        let algorithm = Algorithm::from_config(config);
        let of_all_ranks = algorithm.groups(layout);
        let groups = in_shard(&of_all_ranks, &shard);
        let layouts = state_layouts(&of_all_ranks, layout.trainable_elements(), precision, &shard);
        let muon_settings = groups.iter().find_map(|group| match group.rule {
            UpdateRule::Muon(settings) => Some(settings),
            UpdateRule::AdamW(_) => None,
        });
        let workspace = grad_norm::workspace_elements(shard.len(), device);
        let scalars = [groups.len() * adamw::SCALARS];
        Self {
            algorithm,
            max_grad_norm: config.max_grad_norm.map(|norm| norm as f32),
            groups,
            state: layouts.into_iter().map(|layout| (layout.clone(), layout.add_to(plan))).collect(),
            muon: muon_settings.map(|muon| MuonPlan::add_to(plan, layout, muon, precision, device, (batching, &shard))),
            scalars: plan.add("optimizer.scalars", Category::Scratch, DType::F32, &scalars),
            scalars_staging: (device == DeviceKind::Cuda)
                .then(|| plan.add("optimizer.scalars.staging", Category::Scratch, DType::F32, &scalars)),
            norm: plan.add("gradient_norm", Category::Scratch, DType::F32, &[1]),
            outcome: plan.add("outcome", Category::Scratch, DType::F32, &[OUTCOME]),
            workspace: plan.add("gradient_norm.workspace", Category::Scratch, DType::F32, &[workspace]),
            shard,
        }
    }

    /// Every tensor that the optimizer keeps from step to step.
    pub fn state(&self) -> impl Iterator<Item = &StateLayout> {
        self.state.iter().map(|(layout, _)| layout)
    }
}

/// An optimizer over the weights and gradients of a decoder.
#[derive(Debug)]
pub struct Optimizer {
    algorithm: Algorithm,
    max_grad_norm: Option<f32>,
    groups: Vec<BoundGroup>,
    state: Vec<StateTensor>,
    scalars_upload: Upload<f32>,
    /// Those of this rank's parameters.
    gradients: Buffer,
    norm: Buffer,
    outcome: Buffer,
    outcome_download: Download<f32>,
    workspace: Buffer,
}

/// A parameter group with views of its range of every buffer.
#[derive(Debug)]
struct BoundGroup {
    learning_rate_scale: f64,
    weight_decay: f32,
    /// The step's numbers, see [`adamw`].
    scalars: Buffer,
    weights: Buffer,
    /// Of the f32 master weights, beside bf16 weights.
    low_bits: Option<Buffer>,
    gradients: Buffer,
    rule: BoundRule,
}

/// An update rule with views of the state that it keeps.
#[derive(Debug)]
enum BoundRule {
    AdamW { settings: adamw::AdamW, first_moment: Buffer, second_moment: Buffer },
    Muon(MuonGroup),
}

/// The result of one optimizer step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepOutcome {
    /// What [`Decoder::loss`] has accumulated.
    pub loss: f32,
    /// Global norm of the gradients before clipping.
    pub grad_norm: f32,
    /// False where that norm is not finite: nothing was changed.
    pub applied: bool,
}

impl Optimizer {
    /// Takes its buffers from the arena, all zero, and views of the decoder's weights and gradients.
    pub fn bind(plan: &OptimizerPlan, arena: &Arena, decoder: &Decoder) -> Result<Self> {
        let bound =
            |(layout, id): &(StateLayout, BufferId)| StateTensor { layout: layout.clone(), buffer: arena.buffer(*id) };
        let state: Vec<StateTensor> = plan.state.iter().map(bound).collect();
        let muon =
            |flat: &FlatBuffers<'_>| plan.muon.as_ref().map(|muon| MuonGroup::bind(muon, arena, flat)).transpose();
        let (scalars, outcome) = (arena.buffer(plan.scalars), arena.buffer(plan.outcome));
        let groups = plan.groups.iter().enumerate().map(|(index, group)| {
            let scalars = scalars.view(index * adamw::SCALARS, &[adamw::SCALARS])?;
            BoundGroup::bind(group, scalars, decoder, &state, muon)
        });
        let staging = plan.scalars_staging.map(|id| arena.buffer(id));
        Ok(Self {
            algorithm: plan.algorithm,
            max_grad_norm: plan.max_grad_norm,
            groups: groups.collect::<kernels::Result<_>>()?,
            state,
            scalars_upload: Upload::new(scalars, staging)?,
            gradients: decoder.gradients().view(plan.shard.start, &[plan.shard.len()])?,
            norm: arena.buffer(plan.norm),
            outcome_download: Download::new(outcome.clone())?,
            outcome,
            workspace: arena.buffer(plan.workspace),
        })
    }

    /// [`Optimizer::prepare`], [`Optimizer::update`] and [`Optimizer::outcome`] in one.
    pub fn step(&mut self, decoder: &mut Decoder, step: u64, learning_rate: f64) -> Result<StepOutcome> {
        self.prepare(step, learning_rate)?;
        self.update(decoder, &mut RankMeter::default(), None)?;
        self.outcome(decoder)
    }

    /// Uploads the numbers of step `step` (from 1) of the run, for [`Optimizer::update`]. Waits for nothing.
    pub fn prepare(&mut self, step: u64, learning_rate: f64) -> Result<()> {
        let &adamw::AdamW { beta1, beta2, .. } = self.algorithm.adamw();
        let correction = |beta: f64| (1.0 - beta.powf(step as f64)) as f32;
        let staged = self.scalars_upload.stage()?;
        staged.fill(0.0);
        for (scalars, group) in staged.chunks_exact_mut(adamw::SCALARS).zip(&self.groups) {
            scalars[adamw::LEARNING_RATE] = (learning_rate * group.learning_rate_scale) as f32;
            scalars[adamw::BIAS_CORRECTION1] = correction(beta1);
            scalars[adamw::BIAS_CORRECTION2] = correction(beta2);
        }
        self.scalars_upload.send()?;
        Ok(self.scalars_upload.receive()?)
    }

    /// Updates the weights with the gradients that `decoder` has accumulated, which stay as they are: the next step
    /// begins with [`Decoder::begin_accumulation`]. Waits for nothing but other ranks. `reduction` sums norm and loss,
    /// where there is one.
    pub fn update(
        &mut self,
        decoder: &mut Decoder,
        meter: &mut RankMeter,
        reduction: Option<&mut TreeReduction>,
    ) -> Result<()> {
        timing::scope("optimizer", || {
            let mut loss = decoder.loss().view(0, &[1])?;
            match reduction {
                Some(tree) => tree.norm_and_loss(meter, &mut self.norm, &mut loss, &mut self.workspace)?,
                None => self.norm_and_loss(meter, &mut loss)?,
            }
            Ok(self.groups.iter_mut().try_for_each(|group| {
                grad_norm::clip(&self.norm, self.max_grad_norm, &mut group.scalars)?;
                group.update()
            })?)
        })
    }

    /// Computes the norm of the gradients of all ranks, and adds up their losses.
    fn norm_and_loss(&mut self, meter: &mut RankMeter, loss: &mut Buffer) -> Result<()> {
        grad_norm::forward(&self.gradients, &mut self.norm, &mut self.workspace)?;
        if meter.ranks().exchange().is_none() {
            return Ok(());
        }
        let norm = f64::from(self.norm.read::<f32>()?[0]);
        let mut sums = [norm * norm, f64::from(loss.read::<f32>()?[0])];
        meter.sum(&mut sums)?;
        self.norm.write(&[sums[0].sqrt() as f32])?;
        Ok(loss.write(&[sums[1] as f32])?)
    }

    /// Runs the GEMMs of an update on scratch memory. Weights and state stay as they are.
    pub fn warm_up(&mut self) -> Result<()> {
        Ok(self.groups.iter_mut().try_for_each(|group| match &mut group.rule {
            BoundRule::AdamW { .. } => Ok(()),
            BoundRule::Muon(muon) => muon.warm_up(),
        })?)
    }

    /// What the step did: on a GPU the one wait of a step, for three numbers that are copied as one.
    pub fn outcome(&mut self, decoder: &Decoder) -> Result<StepOutcome> {
        let apply = self.groups[0].scalars.view(adamw::APPLY, &[1])?;
        for (place, number) in [(LOSS, decoder.loss()), (GRAD_NORM, &self.norm), (APPLIED, &apply)] {
            self.outcome.view(place, &[1])?.copy_from(number)?;
        }
        self.outcome_download.start()?;
        let numbers = self.outcome_download.values()?;
        Ok(StepOutcome { loss: numbers[LOSS], grad_norm: numbers[GRAD_NORM], applied: numbers[APPLIED] != 0.0 })
    }

    /// Every tensor that is kept from step to step, in the order in which a checkpoint has them.
    pub fn state(&self) -> &[StateTensor] {
        &self.state
    }

    /// The same, to fill them from a checkpoint.
    pub fn state_mut(&mut self) -> &mut [StateTensor] {
        &mut self.state
    }

    /// Calls `fill` with the low bits of all f32 master weights, beside bf16 weights. Those of other ranks are dropped: they
    /// take 2 bytes per parameter meanwhile.
    pub fn fill_low_bits(&mut self, fill: impl FnOnce(Option<&mut Buffer>) -> Result<()>) -> Result<()> {
        let Some(StateTensor { layout, buffer }) = self.state.iter_mut().find(|tensor| tensor.is_low_bits()) else {
            return fill(None);
        };
        if layout.range == layout.of_all_ranks {
            return fill(Some(buffer));
        }
        let mut all = Buffer::zeros(&[layout.of_all_ranks.len()], layout.dtype, buffer.device())?;
        fill(Some(&mut all))?;
        Ok(buffer.copy_from(&all.view(layout.range.start, &[layout.range.len()])?)?)
    }

    /// The low bits of the f32 master weights of this rank, beside bf16 weights.
    pub fn low_bits_mut(&mut self) -> Option<&mut Buffer> {
        self.state.iter_mut().find(|tensor| tensor.is_low_bits()).map(|tensor| &mut tensor.buffer)
    }
}

impl BoundGroup {
    /// A group over these weights; `muon` binds the matrices of one that Muon updates.
    fn bind(
        group: &ParameterGroup,
        scalars: Buffer,
        decoder: &Decoder,
        state: &[StateTensor],
        muon: impl FnOnce(&FlatBuffers<'_>) -> kernels::Result<Option<MuonGroup>>,
    ) -> kernels::Result<Self> {
        let ParameterGroup { range, rule, learning_rate_scale, weight_decay } = group;
        let flat = |buffer: &Buffer| buffer.view(range.start, &[range.len()]);
        let find = |name: &str| state.iter().find(|tensor| tensor.layout.name == name);
        let kept = |name| find(name).expect("the plan has the state of every rule").view(range);
        let (weights, gradients) = (flat(decoder.weights())?, flat(decoder.gradients())?);
        let low_bits = find(MASTER_LOW_BITS).map(|tensor| tensor.view(range)).transpose()?;
        Ok(Self {
            learning_rate_scale: *learning_rate_scale,
            weight_decay: *weight_decay,
            scalars,
            rule: match *rule {
                UpdateRule::AdamW(settings) => BoundRule::AdamW {
                    settings,
                    first_moment: kept(FIRST_MOMENT)?,
                    second_moment: kept(SECOND_MOMENT)?,
                },
                UpdateRule::Muon(_) => {
                    let (weights, low_bits, gradients) = (&weights, low_bits.as_ref(), &gradients);
                    let momentum = &kept(MOMENTUM)?;
                    let group = muon(&FlatBuffers { weights, low_bits, gradients, momentum, start: range.start })?;
                    BoundRule::Muon(group.expect("the plan has the buffers of every rule"))
                }
            },
            weights,
            low_bits,
            gradients,
        })
    }

    fn update(&mut self) -> kernels::Result<()> {
        let scalars = &self.scalars;
        match &mut self.rule {
            BoundRule::AdamW { settings, first_moment, second_moment } => {
                let (weight, low_bits) = (&mut self.weights, self.low_bits.as_mut());
                let state = AdamWState { weight, low_bits, first_moment, second_moment };
                adamw::step(state, &self.gradients, scalars, settings, self.weight_decay)
            }
            BoundRule::Muon(muon) => muon.update(scalars, self.weight_decay),
        }
    }
}
