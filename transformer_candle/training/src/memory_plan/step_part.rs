//! The parts of an optimizer step, by which its time is predicted and reported.

use serde::Serialize;

/// A part of a step, by the operations that it is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StepPart {
    /// Attention, both directions.
    Attention,
    /// Matmuls, except the head's.
    Gemm,
    /// The head's matmuls, softmax and loss.
    HeadAndLoss,
    /// Norms, rotation, `SwiGLU`, embedding, copies: what only moves bytes.
    NormAndPointwise,
    /// Norm of the gradients, `AdamW` and Muon, and setting the gradients to zero.
    Optimizer,
}

impl StepPart {
    /// Every part, in the order of their names.
    pub const ALL: [Self; 5] =
        [Self::Attention, Self::Gemm, Self::HeadAndLoss, Self::NormAndPointwise, Self::Optimizer];

    /// Which part an operation, such as `linear::forward`, belongs to.
    pub fn from_operation(operation: &str) -> Self {
        match operation.split("::").next() {
            Some("attention") => Self::Attention,
            Some("linear") => Self::Gemm,
            Some("head_cross_entropy") => Self::HeadAndLoss,
            Some("adamw" | "muon" | "grad_norm") => Self::Optimizer,
            // Mostly the gradients, 4 bytes per parameter.
            _ if operation == "Buffer::zero" => Self::Optimizer,
            _ => Self::NormAndPointwise,
        }
    }

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Attention => "attention",
            Self::Gemm => "gemm",
            Self::HeadAndLoss => "head_and_loss",
            Self::NormAndPointwise => "norm_and_pointwise",
            Self::Optimizer => "optimizer",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_belongs_to_a_part() {
        for (operation, part) in [
            ("attention::backward", StepPart::Attention),
            ("linear::backward_weight", StepPart::Gemm),
            ("head_cross_entropy::forward_backward", StepPart::HeadAndLoss),
            ("add_rms_norm::normalize", StepPart::NormAndPointwise),
            ("embedding::backward", StepPart::NormAndPointwise),
            ("Buffer::write", StepPart::NormAndPointwise),
            ("Buffer::zero", StepPart::Optimizer),
            ("grad_norm::clip", StepPart::Optimizer),
            ("muon::orthogonalize", StepPart::Optimizer),
        ] {
            assert_eq!(StepPart::from_operation(operation), part, "{operation}");
        }
    }
}
