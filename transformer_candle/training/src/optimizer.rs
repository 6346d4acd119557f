//! AdamW over the flat buffers: clip by the global norm, update, zero the gradients.
//!
//! The learning rate and the bias corrections are pure functions of the step's number, so the only state is the moments and,
//! beside bf16 weights, the remainders of their f32 masters. A step whose gradient norm is not finite changes nothing; it
//! still counts as a step.

use kernels::{
    Buffer, DType, DeviceKind, adamw, grad_norm,
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
    norm: BufferId,
    workspace: BufferId,
}

impl OptimizerPlan {
    /// Adds the optimizer's buffers for weights of this layout.
    pub fn add_to(plan: &mut Plan, layout: &ParameterLayout, precision: Precision) -> Self {
        let elements = layout.elements();
        let workspace = grad_norm::workspace_elements(elements, DeviceKind::Cpu);
        Self {
            remainder: (precision == Precision::Bf16)
                .then(|| plan.add("remainder", Category::MasterRemainder, DType::I16, &[elements])),
            first_moment: plan.add("first_moment", Category::OptimizerMoments, DType::F32, &[elements]),
            second_moment: plan.add("second_moment", Category::OptimizerMoments, DType::F32, &[elements]),
            scalars: plan.add("optimizer.scalars", Category::Scratch, DType::F32, &[adamw::SCALARS]),
            norm: plan.add("gradient_norm", Category::Scratch, DType::F32, &[1]),
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
    norm: Buffer,
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

/// What one update did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
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
        let (decayed, all) = (decoder.layout().decayed_elements(), decoder.layout().elements());
        Ok(Self {
            ranges: [range(0, decayed, config.weight_decay as f32)?, range(decayed, all, 0.0)?],
            remainder,
            first_moment,
            second_moment,
            scalars: arena.buffer(plan.scalars),
            norm: arena.buffer(plan.norm),
            workspace: arena.buffer(plan.workspace),
            settings: adamw::AdamW { beta1: config.beta1, beta2: config.beta2, epsilon: config.epsilon },
            max_grad_norm: config.max_grad_norm.map(|norm| norm as f32),
        })
    }

    /// Updates the weights with the gradients that `decoder` has accumulated, as step `step` (from 1) of the run, and zeroes
    /// the gradients.
    pub fn step(&mut self, decoder: &mut Decoder, step: u64, learning_rate: f64) -> Result<Update> {
        let correction = |beta: f64| (1.0 - beta.powf(step as f64)) as f32;
        let mut scalars = [0.0; adamw::SCALARS];
        scalars[adamw::LEARNING_RATE] = learning_rate as f32;
        scalars[adamw::BIAS_CORRECTION1] = correction(self.settings.beta1);
        scalars[adamw::BIAS_CORRECTION2] = correction(self.settings.beta2);
        self.scalars.write(&scalars)?;
        grad_norm::forward(decoder.gradients(), &mut self.norm, &mut self.workspace)?;
        grad_norm::clip(&self.norm, self.max_grad_norm, &mut self.scalars)?;
        for range in &mut self.ranges {
            adamw::step(
                &mut range.weights,
                range.remainder.as_mut(),
                &range.gradients,
                &mut range.first_moment,
                &mut range.second_moment,
                &self.scalars,
                &self.settings,
                range.weight_decay,
            )?;
        }
        decoder.gradients_mut().zero()?;
        let grad_norm = self.norm.read_f32()?[0];
        Ok(Update { grad_norm, applied: grad_norm.is_finite() })
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
