//! The optimizer: clip by the global norm, then each group's update rule over its range of the flat buffers.
//!
//! The learning rate and the bias corrections are pure functions of the step's number, so the only state is what
//! [`Optimizer::state`] lists. A step whose gradient norm is not finite changes nothing; it still counts as a step.
//! That is decided on the device: nothing is read back before the update is launched, unless ranks or virtual shards
//! sum their norms on the host.

mod groups;
mod orthogonal;
mod state;

use std::ops::Range;

use kernels::{
    Buffer, DType, DeviceKind, Download, Upload,
    adamw::{self, AdamWState},
    grad_norm,
    memory::{Arena, Category},
    timing,
};
use model::Decoder;
use run_config::RunConfig;

use self::groups::{FIRST_MOMENT, SECOND_MOMENT, adamw_settings, in_shard, state_layouts};
pub use self::groups::{ParameterGroup, UpdateRule, parameter_groups};
pub(crate) use self::orthogonal::flops as muon_flops;
use self::orthogonal::{Batching, MuonGroup};
use self::state::MASTER_LOW_BITS;
pub use self::state::{StateLayout, StateTensor};
use super::{
    settings::EngineSettings,
    shard::{Shard, shards},
    tree_reduction::TreeReduction,
};
use crate::error::Result;

/// Length of the buffer from which a step's outcome is read; the constants below index it.
const OUTCOME: usize = 3;
const LOSS: usize = 0;
const GRAD_NORM: usize = 1;
const APPLIED: usize = 2;

/// Replaces numbers by their sums over all ranks.
pub type SumOverRanks<'a> = &'a mut dyn FnMut(&mut [f64]) -> Result<()>;

/// An optimizer over the weights and gradients of a decoder.
#[derive(Debug)]
pub struct Optimizer {
    adamw: adamw::AdamW,
    max_grad_norm: Option<f32>,
    groups: Vec<BoundGroup>,
    state: Vec<StateTensor>,
    scalars_upload: Upload<f32>,
    /// The gradients of each range of this rank's shard, and the element of `range_norms` that receives their norm.
    gradients: Vec<(Buffer, Buffer)>,
    norm: Buffer,
    range_norms: Buffer,
    outcome: Buffer,
    outcome_download: Download<f32>,
    workspace: Buffer,
}

/// A parameter group with views of this rank's part of it.
#[derive(Debug)]
struct BoundGroup {
    learning_rate_scale: f64,
    weight_decay: f32,
    /// The step's scalars, such as the learning rate: see [`adamw`].
    scalars: Buffer,
    rule: BoundRule,
}

/// An update rule with views of the buffers that it reads and updates.
#[derive(Debug)]
enum BoundRule {
    AdamW { settings: adamw::AdamW, ranges: Vec<AdamWRange> },
    Muon(MuonGroup),
}

/// Views of every buffer of a range that `AdamW` updates.
#[derive(Debug)]
struct AdamWRange {
    weights: Buffer,
    /// Low bits of the f32 master weights; none with f32 weights.
    low_bits: Option<Buffer>,
    gradients: Buffer,
    first_moment: Buffer,
    second_moment: Buffer,
}

/// The result of one optimizer step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepOutcome {
    /// The step's loss, accumulated in [`Decoder::loss`].
    pub loss: f32,
    /// Global norm of the gradients before clipping.
    pub grad_norm: f32,
    /// False where that norm is not finite: nothing was changed.
    pub applied: bool,
}

impl Optimizer {
    /// Takes the optimizer's buffers, and views of the decoder's weights and gradients.
    pub fn new(decoder: &Decoder, config: &RunConfig, settings: EngineSettings, arena: &mut Arena) -> Result<Self> {
        let EngineSettings { device, rank_info, .. } = settings;
        let RunConfig { runtime, optimizer: config, .. } = config;
        let (layout, precision) = (decoder.layout(), runtime.precision);
        // GEMMs of several matrices may round differently, and which are together depends on the number of ranks.
        let batching = match (device, runtime.deterministic_reduction) {
            (DeviceKind::Cuda, None) => Batching::Together,
            _ => Batching::Single,
        };
        let shard = shards(layout, rank_info.world_size).swap_remove(rank_info.rank);
        let of_all_ranks = parameter_groups(config, layout);
        let groups = in_shard(&of_all_ranks, &shard);
        let layouts = state_layouts(&of_all_ranks, layout.trainable_elements(), precision, &shard);
        let state: Vec<StateTensor> = layouts.into_iter().map(|layout| layout.take(arena)).collect();
        let flat = FlatState { decoder, state: &state };
        let muon_settings = groups.iter().find_map(|(group, _)| match group.rule {
            UpdateRule::Muon(settings) => Some(settings),
            UpdateRule::AdamW(_) => None,
        });
        let muon = |settings| MuonGroup::new(&flat, settings, device, batching, &shard, arena);
        let mut muon = muon_settings.map(muon).transpose()?;
        let mut take = |name, elements| arena.take(name, Category::Scratch, DType::F32, &[elements]);
        let numbers = groups.len() * adamw::SCALARS;
        let scalars = take("optimizer.scalars", numbers);
        let staging = (device == DeviceKind::Cuda).then(|| take("optimizer.scalars.staging", numbers));
        let ranges = shard.ranges();
        let (norm, range_norms) = (take("gradient_norm", 1), take("gradient_norm.ranges", ranges.len()));
        let outcome = take("outcome", OUTCOME);
        let largest = ranges.iter().map(ExactSizeIterator::len).max().unwrap_or(0).max(ranges.len());
        let workspace = take("gradient_norm.workspace", grad_norm::workspace_elements(largest, device));
        let groups = groups.iter().enumerate().map(|(index, group)| {
            let scalars = scalars.view(index * adamw::SCALARS, &[adamw::SCALARS])?;
            BoundGroup::new(group, scalars, &flat, &mut muon)
        });
        let gradients = ranges.iter().enumerate().map(|(index, range)| {
            Ok((decoder.gradients().view(range.start, &[range.len()])?, range_norms.view(index, &[1])?))
        });
        Ok(Self {
            adamw: adamw_settings(config),
            max_grad_norm: config.max_grad_norm.map(|norm| norm as f32),
            groups: groups.collect::<kernels::Result<_>>()?,
            gradients: gradients.collect::<kernels::Result<_>>()?,
            state,
            scalars_upload: Upload::new(scalars, staging)?,
            norm,
            range_norms,
            outcome_download: Download::new(outcome.clone())?,
            outcome,
            workspace,
        })
    }

    /// [`Optimizer::prepare`], [`Optimizer::update`] and [`Optimizer::outcome`] in one.
    pub fn step(&mut self, decoder: &mut Decoder, step: u64, learning_rate: f64) -> Result<StepOutcome> {
        self.prepare(step, learning_rate)?;
        self.update(decoder, None, None)?;
        self.outcome(decoder)
    }

    /// Uploads learning rate and bias corrections of step `step` (from 1) for [`Optimizer::update`]. Waits for nothing.
    pub fn prepare(&mut self, step: u64, learning_rate: f64) -> Result<()> {
        let adamw::AdamW { beta1, beta2, .. } = self.adamw;
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
    /// begins with [`Decoder::begin_accumulation`]. Waits for nothing but other ranks, with which norm and loss are summed
    /// once; None where there are none. `reduction`, where there is one, sums them in its order.
    pub fn update(
        &mut self,
        decoder: &mut Decoder,
        sum_over_ranks: Option<SumOverRanks<'_>>,
        reduction: Option<&mut TreeReduction>,
    ) -> Result<()> {
        timing::scope("optimizer", || {
            let mut loss = decoder.loss().view(0, &[1])?;
            match reduction {
                Some(tree) => tree.norm_and_loss(sum_over_ranks, &mut self.norm, &mut loss, &mut self.workspace)?,
                None => self.norm_and_loss(sum_over_ranks, &mut loss)?,
            }
            Ok(self.groups.iter_mut().try_for_each(|group| {
                grad_norm::clip(&self.norm, self.max_grad_norm, &mut group.scalars)?;
                group.update()
            })?)
        })
    }

    /// Computes the norm of the gradients of all ranks, and adds up their losses.
    fn norm_and_loss(&mut self, sum_over_ranks: Option<SumOverRanks<'_>>, loss: &mut Buffer) -> Result<()> {
        let Self { gradients, norm, range_norms, workspace, .. } = self;
        match &mut gradients[..] {
            [(gradients, _)] => grad_norm::forward(gradients, norm, workspace)?,
            ranges => {
                let norm_of = |(gradients, norm): &mut (Buffer, Buffer)| grad_norm::forward(gradients, norm, workspace);
                ranges.iter_mut().try_for_each(norm_of)?;
                grad_norm::forward(range_norms, norm, workspace)?;
            }
        }
        let Some(sum_over_ranks) = sum_over_ranks else { return Ok(()) };
        let norm = f64::from(self.norm.read::<f32>()?[0]);
        let mut sums = [norm * norm, f64::from(loss.read::<f32>()?[0])];
        sum_over_ranks(&mut sums)?;
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

    /// Captures no CUDA graph from now on: every launch is one of its own.
    pub fn run_eagerly(&mut self) {
        for group in &mut self.groups {
            if let BoundRule::Muon(muon) = &mut group.rule {
                muon.run_eagerly();
            }
        }
    }

    /// Returns what the step did. On a GPU this is the one wait of a step, for three numbers in one copy.
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

    /// Returns the tensors of [`Optimizer::state`], to fill them from a checkpoint.
    pub fn state_mut(&mut self) -> &mut [StateTensor] {
        &mut self.state
    }

    /// Calls `fill` with the low bits of all f32 master weights (None with f32 weights) and keeps those of this rank.
    /// The others take 2 bytes per parameter meanwhile.
    pub fn fill_low_bits(&mut self, fill: impl FnOnce(Option<&mut Buffer>) -> Result<()>) -> Result<()> {
        let Some(StateTensor { layout, buffer }) = self.state.iter_mut().find(|tensor| tensor.is_low_bits()) else {
            return fill(None);
        };
        if layout.shard.len() == layout.of_all_ranks.len() {
            return fill(Some(buffer));
        }
        let mut all = Buffer::zeros(&[layout.of_all_ranks.len()], layout.dtype, buffer.device())?;
        fill(Some(&mut all))?;
        let mut position = 0;
        for range in layout.shard.ranges() {
            let own = [range.len()];
            buffer.view(position, &own)?.copy_from(&all.view(range.start, &own)?)?;
            position += range.len();
        }
        Ok(())
    }

    /// The low bits of this rank's f32 master weights; none with f32 weights.
    pub fn low_bits_mut(&mut self) -> Option<&mut Buffer> {
        self.state.iter_mut().find(|tensor| tensor.is_low_bits()).map(|tensor| &mut tensor.buffer)
    }
}

/// The flat buffers, of which a group's parameters are ranges.
struct FlatState<'a> {
    decoder: &'a Decoder,
    state: &'a [StateTensor],
}

impl FlatState<'_> {
    /// Low bits of the f32 master weights from `start` on; None with f32 weights.
    fn low_bits(&self, start: usize, shape: &[usize]) -> kernels::Result<Option<Buffer>> {
        self.find(MASTER_LOW_BITS).map(|low_bits| low_bits.view(start, shape)).transpose()
    }

    /// The state of this name from `start` on.
    fn view(&self, name: &str, start: usize, shape: &[usize]) -> kernels::Result<Buffer> {
        self.find(name).expect("every rule has its state").view(start, shape)
    }

    fn find(&self, name: &str) -> Option<&StateTensor> {
        self.state.iter().find(|tensor| tensor.layout.name == name)
    }
}

impl BoundGroup {
    /// This rank's part of a group; a group that Muon updates takes its matrices.
    fn new(
        (group, shard): &(ParameterGroup, Shard),
        scalars: Buffer,
        flat: &FlatState<'_>,
        muon: &mut Option<MuonGroup>,
    ) -> kernels::Result<Self> {
        let ParameterGroup { rule, learning_rate_scale, weight_decay, .. } = group;
        Ok(Self {
            learning_rate_scale: *learning_rate_scale,
            weight_decay: *weight_decay,
            scalars,
            rule: match *rule {
                UpdateRule::AdamW(settings) => {
                    let views = |range: &Range<usize>| {
                        let (start, shape) = (range.start, &[range.len()]);
                        Ok(AdamWRange {
                            weights: flat.decoder.weights().flat.view(start, shape)?,
                            low_bits: flat.low_bits(start, shape)?,
                            gradients: flat.decoder.gradients().view(start, shape)?,
                            first_moment: flat.view(FIRST_MOMENT, start, shape)?,
                            second_moment: flat.view(SECOND_MOMENT, start, shape)?,
                        })
                    };
                    let ranges = shard.ranges().iter().map(views).collect::<kernels::Result<_>>()?;
                    BoundRule::AdamW { settings, ranges }
                }
                UpdateRule::Muon(_) => BoundRule::Muon(muon.take().expect("one group has the matrices")),
            },
        })
    }

    fn update(&mut self) -> kernels::Result<()> {
        let scalars = &self.scalars;
        match &mut self.rule {
            BoundRule::AdamW { settings, ranges } => ranges.iter_mut().try_for_each(|range| {
                let AdamWRange { weights: weight, low_bits, gradients, first_moment, second_moment } = range;
                let state = AdamWState { weight, low_bits: low_bits.as_mut(), first_moment, second_moment };
                adamw::step(state, gradients, scalars, settings, self.weight_decay)
            }),
            BoundRule::Muon(muon) => muon.update(scalars, self.weight_decay),
        }
    }
}
