//! What computes a step.

mod optimizer;

pub use optimizer::{
    Algorithm, Optimizer, OptimizerPlan, ParameterGroup, StateLayout, StateTensor, StepOutcome, UpdateRule,
};
