//! The plan as people read it.

use std::{fmt, time::Duration};

use run_config::Precision;

use super::{MemoryPlan, estimate::Estimate};
use crate::{
    error::shortage::recompute,
    units::{bytes, duration, grouped},
};

/// A larger share of a step's FLOPs in the optimizer is remarked on.
const LARGEST_OPTIMIZER_SHARE: f64 = 0.2;

fn precision(precision: Precision) -> &'static str {
    match precision {
        Precision::Fp32 => "fp32",
        Precision::Bf16 => "bf16",
    }
}

/// `8.416 GFLOP`
fn flops(number: f64) -> String {
    match number {
        1e9.. => format!("{:.3} GFLOP", number / 1e9),
        1e6.. => format!("{:.3} MFLOP", number / 1e6),
        _ => format!("{number:.0} FLOP"),
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows = vec![("model", self.model()), ("step", self.step()), ("length", self.length())];
        let budget = self.budget.as_ref().map(|budget| format!(" of {budget}")).unwrap_or_default();
        rows.push(("memory", format!("{}{budget}", bytes(self.bytes))));
        let categories = self.bytes_by_category.iter().map(|line| (line.bytes, line.category.as_str()));
        let saving = (self.saving_bytes, "host memory while saving");
        rows.extend(categories.chain([saving]).map(|(size, what)| ("", format!("{:>10}  {what}", bytes(size)))));
        rows.push(("disk", self.disk()));
        rows.extend(self.optimizer_share.map(|share| ("optimizer", optimizer(share))));
        rows.extend(self.estimate.as_ref().map(|estimate| ("time", time(estimate))));
        rows.extend(self.shortage.as_ref().map(|shortage| ("", shortage.to_string())));
        let lines: Vec<String> = rows.iter().map(|(name, text)| format!("{name:<11}{text}")).collect();
        f.write_str(&lines.join("\n"))
    }
}

impl MemoryPlan {
    fn model(&self) -> String {
        let (parameters, precision) = (grouped(self.parameters), precision(self.precision));
        let trained = if self.trainable_parameters == self.parameters {
            String::new()
        } else {
            format!(" and {} of adapters that train", grouped(self.trainable_parameters))
        };
        format!("{parameters} parameters{trained}, {precision}, {} per token", flops(self.flops_per_token))
    }

    fn step(&self) -> String {
        let warm_up = |(first, steps)| format!("; {first} sequences in the first step, all after {}", grouped(steps));
        format!(
            "{} tokens: {} sequences of {}, as {} x {} (batch x accumulation), activation_recompute: {}{}",
            grouped(self.tokens_per_step),
            grouped(self.sequences_per_step),
            grouped(self.sequence_length),
            self.micro_batch,
            self.gradient_accumulation_steps,
            recompute(self.activation_recompute),
            self.batch_warmup.map(warm_up).unwrap_or_default()
        )
    }

    fn length(&self) -> String {
        let (Some(steps), Some(tokens)) = (self.total_steps, self.total_tokens) else {
            return "determined by scheduler.total_epochs".into();
        };
        let per_parameter = tokens as f64 / self.parameters as f64;
        format!("{} steps, {} tokens, {per_parameter:.1} per parameter", grouped(steps), grouped(tokens))
    }

    fn disk(&self) -> String {
        let (one, all) = (bytes(self.checkpoint_bytes), bytes(self.checkpoint_bytes * self.checkpoints));
        format!("{one} per checkpoint, at most {} at a time: {all}", self.checkpoints)
    }
}

/// The optimizer's GEMMs cost the same whatever the tokens per step.
fn optimizer(share: f64) -> String {
    let text = format!("Muon's GEMMs are {:.1} % of a step's FLOPs", 100.0 * share);
    if share <= LARGEST_OPTIMIZER_SHARE {
        return text;
    }
    format!("{text}: more tokens per step (data.sequences_per_step) make them cheaper")
}

fn time(estimate: &Estimate) -> String {
    let Estimate { tokens_per_second, seconds, assumption } = estimate;
    let time = seconds.map(|seconds| format!("{} at ", duration(Duration::from_secs_f64(seconds))));
    format!("{}{} tokens/s {assumption}", time.unwrap_or_default(), grouped(*tokens_per_second as u64))
}
