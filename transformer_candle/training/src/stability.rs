//! Suggested changes to the config of a run that diverged or whose loss jumps: a lower learning rate, a longer warm-up,
//! gradients clipped at a smaller norm.

use run_config::RunConfig;
use serde::Serialize;

use crate::memory_plan::Change;
use crate::units::rounded;

/// Learning rates that are usual for adapters, and for all weights of a pretrained model: trl's.
const USUAL_OF_ADAPTERS: f64 = 2e-4;
const USUAL_OF_FINE_TUNING: f64 = 2e-5;
/// The suggested warm-up is at least this fraction of all steps, and at most one in `LONGEST_WARM_UP` of them.
const WARM_UP: f64 = 0.03;
const LONGEST_WARM_UP: u64 = 5;
/// Norms that are suggested for clipping: the first below the config's.
const CLIPPING: [f64; 2] = [1.0, 0.5];

/// A change of a key, and its effect.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StabilityChange {
    /// The key with its value before and after.
    #[serde(flatten)]
    pub change: Change,
    /// The effect, in a few words.
    pub effect: &'static str,
}

/// Returns changes that make training less likely to diverge, strongest first; the length of the run stays.
pub fn against_divergence(config: &RunConfig) -> Vec<StabilityChange> {
    [learning_rate(config), min_lr(config), warm_up(config), clipping(config)].into_iter().flatten().collect()
}

fn change(key: &'static str, from: &str, to: &str, effect: &'static str) -> StabilityChange {
    StabilityChange { change: Change { key, from: from.to_owned(), to: to.to_owned() }, effect }
}

/// Returns half of the learning rate, or the usual rate of fine-tuning if that is lower.
fn lower_rate(config: &RunConfig) -> f64 {
    let usual = match (config.lora.rank, &config.model.init_from) {
        (Some(_), _) => USUAL_OF_ADAPTERS,
        (None, Some(_)) => USUAL_OF_FINE_TUNING,
        (None, None) => f64::INFINITY,
    };
    rounded((config.optimizer.learning_rate / 2.0).min(usual))
}

fn learning_rate(config: &RunConfig) -> Option<StabilityChange> {
    let (from, to) = (config.optimizer.learning_rate, lower_rate(config));
    let effect = "smaller updates; learning takes more steps";
    (to < from).then(|| change("optimizer.learning_rate", &from.to_string(), &to.to_string(), effect))
}

fn min_lr(config: &RunConfig) -> Option<StabilityChange> {
    let (from, to) = (config.scheduler.min_lr, lower_rate(config));
    let effect = "not above the learning rate";
    (to < from).then(|| change("scheduler.min_lr", &from.to_string(), &to.to_string(), effect))
}

fn warm_up(config: &RunConfig) -> Option<StabilityChange> {
    let from = config.scheduler.warmup_steps;
    let longer = match config.scheduler.total_steps {
        Some(total) => (2 * from).max((WARM_UP * total as f64).ceil() as u64).min(total / LONGEST_WARM_UP),
        None => 2 * from,
    };
    let effect = "the first updates are smaller, while the moments are estimates of few gradients";
    (longer > from).then(|| change("scheduler.warmup_steps", &from.to_string(), &longer.to_string(), effect))
}

fn clipping(config: &RunConfig) -> Option<StabilityChange> {
    let from = config.optimizer.max_grad_norm;
    let to = CLIPPING.into_iter().find(|norm| from.is_none_or(|from| *norm < from))?;
    let from = from.map_or_else(|| "null".to_owned(), |norm| norm.to_string());
    let effect = "a batch with a large gradient changes the weights less";
    Some(change("optimizer.max_grad_norm", &from, &to.to_string(), effect))
}

#[cfg(test)]
mod tests {
    use run_config::Format;

    use super::*;

    fn config(keys: &[&str]) -> RunConfig {
        let text = "{model: {vocab_size: 300, hidden_size: 32, intermediate_size: 64, num_layers: 1, \
                    num_attention_heads: 2}, data: {sequence_length: 32, sequences_per_step: 4}, \
                    optimizer: {learning_rate: 1.0e-3}, scheduler: {total_steps: 1000, warmup_steps: 10}}";
        let keys: Vec<String> = keys.iter().map(ToString::to_string).collect();
        RunConfig::parse(text, Format::Yaml, &keys).unwrap()
    }

    fn changes(config: &RunConfig) -> Vec<String> {
        against_divergence(config).iter().map(|stabler| stabler.change.as_override()).collect()
    }

    #[test]
    fn rate_warm_up_and_clipping_are_changed() {
        let config = config(&["optimizer.max_grad_norm=null", "scheduler.min_lr=8e-4"]);
        let expected = [
            "optimizer.learning_rate=0.0005",
            "scheduler.min_lr=0.0005",
            "scheduler.warmup_steps=30",
            "optimizer.max_grad_norm=1",
        ];
        assert_eq!(changes(&config), expected);
    }

    #[test]
    fn adapters_go_back_to_their_usual_rate_at_least() {
        let mut config = config(&["optimizer.max_grad_norm=0.1", "scheduler.warmup_steps=200"]);
        config.lora.rank = Some(8);
        assert_eq!(changes(&config), ["optimizer.learning_rate=0.0002"], "warmed up and clipped enough");
        config.optimizer.learning_rate = 1e-4;
        config.scheduler.min_lr = 0.0;
        assert_eq!(changes(&config), ["optimizer.learning_rate=0.00005"]);
    }

    #[test]
    fn the_changes_make_a_config_that_loads() {
        for keys in [&["optimizer.max_grad_norm=null"][..], &["scheduler.total_steps=20", "scheduler.warmup_steps=1"]] {
            let initial_config = config(keys);
            let keys: Vec<String> = changes(&initial_config);
            let stable_config = RunConfig::parse(&initial_config.to_commented_yaml(), Format::Yaml, &keys).unwrap();
            assert!(stable_config.optimizer.learning_rate < initial_config.optimizer.learning_rate);
            assert!(stable_config.scheduler.warmup_steps >= initial_config.scheduler.warmup_steps);
        }
    }
}
