//! AdamW over the flat buffers: clip by the global norm, update.
//!
//! The learning rate and the bias corrections are pure functions of the step's number, so the only state is the moments and,
//! beside bf16 weights, the remainders of their f32 masters. A step whose gradient norm is not finite changes nothing; it
//! still counts as a step. That is decided where the gradients lie: nothing is read back before the update is under way.

use kernels::{
    Buffer, DType, DeviceKind, Download, Upload, adamw, grad_norm,
    memory::{Arena, BufferId, Category, Plan},
};
use model::{Decoder, ParameterLayout, Precision};
use run_config::OptimizerConfig;

use crate::error::Result;

/// The optimizer's buffers in a memory plan.
#[derive(Clone, Copy, Debug)]
pub struct OptimizerPlan {
    remainder: Option<BufferId>,
    first_moment: BufferId,
    second_moment: BufferId,
    scalars: BufferId,
    /// Where a card's scalars land before it is their turn.
    landing: Option<BufferId>,
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
    pub fn add_to(plan: &mut Plan, layout: &ParameterLayout, precision: Precision, device: DeviceKind) -> Self {
        let elements = layout.elements();
        let workspace = grad_norm::workspace_elements(elements, device);
        let scalars = [adamw::SCALARS];
        Self {
            remainder: (precision == Precision::Bf16)
                .then(|| plan.add("remainder", Category::MasterRemainder, DType::I16, &[elements])),
            first_moment: plan.add("first_moment", Category::OptimizerMoments, DType::F32, &[elements]),
            second_moment: plan.add("second_moment", Category::OptimizerMoments, DType::F32, &[elements]),
            scalars: plan.add("optimizer.scalars", Category::Scratch, DType::F32, &scalars),
            landing: (device == DeviceKind::Cuda)
                .then(|| plan.add("optimizer.scalars.landing", Category::Scratch, DType::F32, &scalars)),
            norm: plan.add("gradient_norm", Category::Scratch, DType::F32, &[1]),
            outcome: plan.add("outcome", Category::Scratch, DType::F32, &[OUTCOME]),
            workspace: plan.add("gradient_norm.workspace", Category::Scratch, DType::F32, &[workspace]),
        }
    }
}

/// AdamW's state and settings.
#[derive(Debug)]
pub struct Optimizer {
    remainder: Option<Buffer>,
    first_moment: Buffer,
    second_moment: Buffer,
    scalars: Buffer,
    scalars_upload: Upload<f32>,
    norm: Buffer,
    outcome: Buffer,
    outcome_download: Download<f32>,
    workspace: Buffer,
    settings: adamw::AdamW,
    max_grad_norm: Option<f32>,
    /// The decayed front of the flat buffers and the rest.
    ranges: [Range; 2],
}

/// Views of one part of the flat buffers.
#[derive(Debug)]
struct Range {
    weight_decay: f32,
    weights: Buffer,
    remainder: Option<Buffer>,
    gradients: Buffer,
    first_moment: Buffer,
    second_moment: Buffer,
}

/// What one optimizer step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// What [`Decoder::loss`] has accumulated.
    pub loss: f32,
    /// Global norm of the gradients before clipping.
    pub grad_norm: f32,
    /// False where that norm is not finite: nothing was changed.
    pub applied: bool,
}

impl Optimizer {
    /// Takes its buffers from the arena, all zero, and views of the decoder's weights and gradients.
    pub fn bind(plan: &OptimizerPlan, arena: &Arena, decoder: &Decoder, config: &OptimizerConfig) -> Result<Self> {
        let remainder = plan.remainder.map(|id| arena.buffer(id));
        let (first_moment, second_moment) = (arena.buffer(plan.first_moment), arena.buffer(plan.second_moment));
        let range = |start: usize, end: usize, weight_decay: f32| -> Result<Range> {
            let view = |buffer: &Buffer| buffer.view(start, &[end - start]);
            Ok(Range {
                weight_decay,
                weights: view(decoder.weights())?,
                remainder: remainder.as_ref().map(view).transpose()?,
                gradients: view(decoder.gradients())?,
                first_moment: view(&first_moment)?,
                second_moment: view(&second_moment)?,
            })
        };
        let (scalars, outcome) = (arena.buffer(plan.scalars), arena.buffer(plan.outcome));
        let landing = plan.landing.map(|id| arena.buffer(id));
        let (decayed, all) = (decoder.layout().decayed_elements(), decoder.layout().elements());
        Ok(Self {
            ranges: [range(0, decayed, config.weight_decay as f32)?, range(decayed, all, 0.0)?],
            remainder,
            first_moment,
            second_moment,
            scalars_upload: Upload::new(scalars.clone(), landing)?,
            scalars,
            norm: arena.buffer(plan.norm),
            outcome_download: Download::new(outcome.clone())?,
            outcome,
            workspace: arena.buffer(plan.workspace),
            settings: adamw::AdamW { beta1: config.beta1, beta2: config.beta2, epsilon: config.epsilon },
            max_grad_norm: config.max_grad_norm.map(|norm| norm as f32),
        })
    }

    /// [`Optimizer::prepare`], [`Optimizer::update`] and [`Optimizer::outcome`] in one.
    pub fn step(&mut self, decoder: &mut Decoder, step: u64, learning_rate: f64) -> Result<Outcome> {
        self.prepare(step, learning_rate)?;
        self.update(decoder)?;
        self.outcome(decoder)
    }

    /// Uploads the numbers of step `step` (from 1) of the run, for [`Optimizer::update`]. Waits for nothing.
    pub fn prepare(&mut self, step: u64, learning_rate: f64) -> Result<()> {
        let adamw::AdamW { beta1, beta2, .. } = self.settings;
        let correction = |beta: f64| (1.0 - beta.powf(step as f64)) as f32;
        let scalars = self.scalars_upload.stage()?;
        scalars.fill(0.0);
        scalars[adamw::LEARNING_RATE] = learning_rate as f32;
        scalars[adamw::BIAS_CORRECTION1] = correction(beta1);
        scalars[adamw::BIAS_CORRECTION2] = correction(beta2);
        self.scalars_upload.send()?;
        Ok(self.scalars_upload.receive()?)
    }

    /// Updates the weights with the gradients that `decoder` has accumulated, which stay as they are: the next step begins with
    /// [`Decoder::begin_accumulation`]. Waits for nothing.
    pub fn update(&mut self, decoder: &mut Decoder) -> Result<()> {
        grad_norm::forward(decoder.gradients(), &mut self.norm, &mut self.workspace)?;
        grad_norm::clip(&self.norm, self.max_grad_norm, &mut self.scalars)?;
        for range in &mut self.ranges {
            let state = adamw::AdamWState {
                weight: &mut range.weights,
                low_bits: range.remainder.as_mut(),
                first_moment: &mut range.first_moment,
                second_moment: &mut range.second_moment,
            };
            adamw::step(state, &range.gradients, &self.scalars, &self.settings, range.weight_decay)?;
        }
        Ok(())
    }

    /// What the step did: on a card the one wait of a step, for three numbers that are copied as one.
    pub fn outcome(&mut self, decoder: &Decoder) -> Result<Outcome> {
        let apply = self.scalars.view(adamw::APPLY, &[1])?;
        for (place, number) in [(LOSS, decoder.loss()), (GRAD_NORM, &self.norm), (APPLIED, &apply)] {
            self.outcome.view(place, &[1])?.copy_from(number)?;
        }
        self.outcome_download.start()?;
        let numbers = self.outcome_download.values()?;
        Ok(Outcome { loss: numbers[LOSS], grad_norm: numbers[GRAD_NORM], applied: numbers[APPLIED] != 0.0 })
    }

    /// The low halves of the f32 master weights, beside bf16 weights.
    pub fn remainder(&self) -> Option<&Buffer> {
        self.remainder.as_ref()
    }

    /// The running means of the gradients.
    pub fn first_moment(&self) -> &Buffer {
        &self.first_moment
    }

    /// The running means of the squared gradients.
    pub fn second_moment(&self) -> &Buffer {
        &self.second_moment
    }

    /// Remainder and both moments, to fill them from a checkpoint.
    pub fn state_mut(&mut self) -> (Option<&mut Buffer>, &mut Buffer, &mut Buffer) {
        (self.remainder.as_mut(), &mut self.first_moment, &mut self.second_moment)
    }
}
