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

    /// Returns the part that an operation, such as `linear::forward`, belongs to.
    pub fn from_operation(operation: &str) -> Self {
        match operation.split("::").next() {
            Some("attention") => Self::Attention,
            Some("linear" | "lora") => Self::Gemm,
            Some("head_cross_entropy") => Self::HeadAndLoss,
            Some("adamw" | "muon" | "grad_norm" | "accumulate") => Self::Optimizer,
            // Mostly the gradients, 4 bytes per parameter.
            _ if operation == "Buffer::zero" => Self::Optimizer,
            _ => Self::NormAndPointwise,
        }
    }

    /// Returns the name of an operation in profiles: `qkv backward` for `linear::backward_input` in the scope `qkv`,
    /// and `rope backward` for `rope::backward`.
    pub(crate) fn label(operation: &str, scope: Option<&str>) -> String {
        let (module, function) = operation.split_once("::").unwrap_or((operation, ""));
        let direction = match function {
            "forward_backward" => return module.to_owned(),
            function if function.starts_with("backward") => "backward",
            // `forward_add`, and `normalize`, which is part of it.
            function if function.starts_with("forward") || function == "normalize" => "forward",
            function => function,
        };
        match module {
            "linear" => format!("{} {direction}", scope.unwrap_or(module)),
            "muon" | "lora" => module.to_owned(),
            "Buffer" => operation.to_owned(),
            _ => format!("{module} {direction}"),
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
    fn a_label_tells_projections_and_directions_apart() {
        for (operation, scope, label) in [
            ("linear::forward", Some("qkv"), "qkv forward"),
            ("linear::backward_weight", Some("down"), "down backward"),
            ("linear::forward", None, "linear forward"),
            ("attention::backward", Some("attention backward"), "attention backward"),
            ("add_rms_norm::forward_add", Some("mlp"), "add_rms_norm forward"),
            ("head_cross_entropy::forward_backward", Some("head"), "head_cross_entropy"),
            ("muon::orthogonalize", None, "muon"),
            ("Buffer::zero", None, "Buffer::zero"),
            ("grad_norm::clip", None, "grad_norm clip"),
        ] {
            assert_eq!(StepPart::label(operation, scope), label, "{operation}");
        }
    }

    #[test]
    fn every_operation_belongs_to_a_part() {
        for (operation, part) in [
            ("attention::backward", StepPart::Attention),
            ("linear::backward_weight", StepPart::Gemm),
            ("lora::project", StepPart::Gemm),
            ("head_cross_entropy::forward_backward", StepPart::HeadAndLoss),
            ("add_rms_norm::normalize", StepPart::NormAndPointwise),
            ("embedding::backward", StepPart::NormAndPointwise),
            ("Buffer::write", StepPart::NormAndPointwise),
            ("Buffer::zero", StepPart::Optimizer),
            ("grad_norm::clip", StepPart::Optimizer),
            ("accumulate::forward", StepPart::Optimizer),
            ("muon::orthogonalize", StepPart::Optimizer),
        ] {
            assert_eq!(StepPart::from_operation(operation), part, "{operation}");
        }
    }
}
