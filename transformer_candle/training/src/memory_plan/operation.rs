//! Launches of one kind in a step, and their names.

use super::step_part::StepPart;

/// The scope of the adapters' matmuls.
pub(super) const ADAPTERS: &str = "adapters";

/// [`Operation::kernel`] and [`Operation::scope`].
pub(super) type KernelAndScope = (&'static str, &'static str);

/// Which sustained rate bounds an operation's FLOPs per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Rate {
    Gemm,
    Fp8Gemm,
    AttentionForward,
    AttentionBackward,
}

/// Launches of one kind in a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operation {
    /// The operation of crate `kernels`, such as `linear::forward`; Muon's are counted together by their module.
    pub(super) kernel: &'static str,
    /// What tells operations of one kernel apart: a projection, or a part of the kernel. Empty if there is one.
    pub(super) scope: &'static str,
    pub(super) rate: Rate,
    /// Launches per step.
    pub(super) count: f64,
    /// FLOPs of one.
    pub(super) flops: f64,
    /// Bytes that one moves.
    pub(super) bytes: f64,
}

impl Operation {
    pub(super) fn part(&self) -> StepPart {
        StepPart::from_operation(self.kernel)
    }

    /// Its name in profiles; empty for those of an adapter that are timed with those of its projection.
    pub(super) fn label(&self) -> String {
        if self.scope == ADAPTERS && self.kernel.starts_with("linear::") {
            return String::new();
        }
        StepPart::label(self.kernel, Some(self.scope))
    }

    /// Its name in the table of operations: `qkv dW`, `rope backward`.
    pub(super) fn name(&self) -> String {
        let (module, function) = self.kernel.split_once("::").unwrap_or((self.kernel, ""));
        let subject = if self.scope.is_empty() { module } else { self.scope };
        let direction = match function {
            "forward_backward" | "" => return subject.to_owned(),
            "forward_add" | "project" | "expand" => "forward",
            "backward_recomputing" => "backward",
            "backward_input" | "backward_expand" => "dX",
            "backward_weight" | "backward_b" => "dW",
            function => function,
        };
        format!("{subject} {direction}")
    }
}
